"""Style and script of the page: kept short, inline, and complete without the script."""

from __future__ import annotations

CSS = r"""
:root{color-scheme:light dark;--bg:#f6f4f0;--card:#fff;--ink:#1f2328;--soft:#5c6370;--line:#dcd8d0;--fire:#b93a0e;
--fire-bg:#fde6da;--ok:#2b6e49;--ok-bg:#e3f1e8;--warn:#8a5a00;--warn-bg:#fbefcf;--mute-bg:#eeebe5;--accent:#1f5a96}
@media(prefers-color-scheme:dark){:root{--bg:#15171b;--card:#1e2126;--ink:#e6e4df;--soft:#a3a9b3;--line:#363b43;
--fire:#ff9a6b;--fire-bg:#4a2413;--ok:#86cfa4;--ok-bg:#1b3527;--warn:#e9be60;--warn-bg:#3d3013;--mute-bg:#2a2e35;
--accent:#8ab8ea}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",
"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:72rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.5rem}
.brand{margin:0;color:var(--fire);font-weight:700;letter-spacing:.08em;text-transform:uppercase;font-size:.75rem}
h1{font-size:1.75rem;line-height:1.2;margin:.2rem 0 .4rem}
h2{font-size:1.15rem;margin:0 0 .7rem}
h3{font-size:.95rem;margin:1.1rem 0 .4rem}
p{margin:.4rem 0}
.lead{color:var(--soft);margin:0 0 .9rem}
nav{display:flex;flex-wrap:wrap;gap:.35rem;margin:0 0 1rem}
nav a{padding:.15rem .65rem;border:1px solid var(--line);border-radius:1rem;color:var(--accent);text-decoration:none;
font-size:.85rem;background:var(--card)}
nav a:hover,nav a:focus-visible{border-color:var(--accent)}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1.1rem 1.25rem;margin:0 0 1rem}
footer{color:var(--soft);font-size:.85rem;padding-bottom:2.5rem}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;font-size:.88em}
pre{margin:.5rem 0;padding:.8rem .9rem;background:var(--mute-bg);border-radius:.4rem;white-space:pre-wrap}
ul,ol{margin:.4rem 0;padding-left:1.25rem}
li{margin:.2rem 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:.55rem 1.5rem;margin:.4rem 0}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .6rem;border-bottom:1px solid var(--line);
overflow-wrap:break-word}
th{color:var(--soft);font-weight:600;font-size:.8rem}
td{min-width:4.5rem}
td.wide,th.wide{min-width:17rem}
.badge{display:inline-block;padding:.05rem .5rem;border-radius:.8rem;background:var(--mute-bg);font-size:.8rem;
white-space:nowrap;margin-right:.3rem}
.fire{background:var(--fire-bg);color:var(--fire)}
.ok{background:var(--ok-bg);color:var(--ok)}
.warn{background:var(--warn-bg);color:var(--warn)}
.soft{color:var(--soft);font-size:.88rem}
.headline{font-size:1.1rem;font-weight:600;margin:0 0 .5rem}
.steps{list-style:none;
display:flex;flex-wrap:wrap;gap:.4rem 1.35rem;padding:0;counter-reset:n}
.steps li{position:relative;
padding:.3rem .65rem;border:1px solid var(--line);border-radius:.4rem;font-size:.85rem;margin:0}
.steps li+li::before{content:"\2192";position:absolute;left:-1.15rem;color:var(--soft)}
.steps li.fire{border-color:var(--fire);font-weight:600}
.map{width:auto}
.map th,.map td{text-align:center;padding:.25rem .5rem;min-width:3.1rem;border:1px solid var(--line)}
.map th[scope=row]{text-align:right;white-space:nowrap}
.map td.origin{background:var(--fire);color:var(--card);font-weight:700}
.map td.bad{background:var(--fire-bg);color:var(--fire)}
.map td.clean{color:var(--ok)}
.map td.unknown{color:var(--soft)}
.grid td{text-align:center;min-width:2.4rem}
.grid th{min-width:2.4rem;text-align:center}
.grid th:first-child{text-align:left;min-width:19rem;font-weight:400;color:var(--ink);font-size:.85rem}
.grid tbody th .badge{float:right;margin:0 0 0 .6rem}
.grid .says-for{background:var(--fire-bg);color:var(--fire);font-weight:700}
.grid .says-against{color:var(--soft);background:var(--mute-bg)}
.grid .says-excludes{background:var(--ok-bg);color:var(--ok);font-weight:700}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;font-size:.82rem;color:var(--soft);margin:.4rem 0}
.legend b{font-weight:600;color:var(--ink)}
.columns{columns:2;column-gap:2rem}
.columns li{break-inside:avoid;font-size:.9rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0}
figcaption{font-size:.85rem;color:var(--soft)}
svg{width:100%;height:auto;display:block}
svg.key{display:inline;width:30px;height:12px;vertical-align:middle}
svg text{fill:var(--soft);font-size:12px;font-family:inherit}
svg .axis{stroke:var(--line);stroke-width:1}
svg .c0{stroke:#b93a0e;fill:#b93a0e}svg .c1{stroke:#1f6fb2;fill:#1f6fb2}svg .c2{stroke:#2b8a57;fill:#2b8a57}
svg .c3{stroke:#8b4fc1;fill:#8b4fc1}svg .c4{stroke:#a07a00;fill:#a07a00}svg .c5{stroke:#5c6370;fill:#5c6370}
@media(prefers-color-scheme:dark){svg .c0{stroke:#ff9a6b;fill:#ff9a6b}svg .c1{stroke:#7ab6f0;fill:#7ab6f0}
svg .c2{stroke:#7fd0a0;fill:#7fd0a0}svg .c3{stroke:#c79bf0;fill:#c79bf0}svg .c4{stroke:#e0bb55;fill:#e0bb55}}
@media print{svg .c0{stroke:#b93a0e;fill:#b93a0e}svg .c1{stroke:#1f6fb2;fill:#1f6fb2}}
svg path.line{fill:none;stroke-width:2}
svg path.band{stroke:none;fill-opacity:.15}
svg .dot{stroke:none}
svg .d1{stroke-dasharray:7 3}svg .d2{stroke-dasharray:2 3}svg .d3{stroke-dasharray:9 3 2 3}
details{margin:.5rem 0}
summary{cursor:pointer;color:var(--accent)}
button,input{font:inherit;
font-size:.85rem;padding:.3rem .7rem;border:1px solid var(--line);border-radius:.4rem;background:var(--card);
color:var(--ink)}
[data-js]{display:none}
.js [data-js]{display:inline-block}
.nowrap{white-space:nowrap}
@media(max-width:40rem){.map th,.map td{min-width:0;padding:.15rem .28rem;font-size:.72rem}
h1{font-size:1.35rem}section{padding:.9rem}.columns{columns:1}dl{grid-template-columns:1fr}
header,main,footer{padding-left:.75rem;padding-right:.75rem}}
@media print{:root{
--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;--fire:#8c2400;--fire-bg:#f6ddd0;--ok:#1d5235;
--ok-bg:#e4efe8;--warn:#6b4500;--warn-bg:#f5ecd2;--mute-bg:#f2f2f2;--accent:#000}
body{font-size:10.5pt}
nav,.js [data-js]{display:none}section{border:0;border-top:1px solid #bbb;border-radius:0;padding:.6rem 0}
h2,h3{break-after:avoid}tr,li,figure{break-inside:avoid}.scroll{overflow:visible}td.wide,th.wide{min-width:0}
table{font-size:8.5pt}
.map td,.map th,.grid td,.grid th,.grid th:first-child{min-width:0;padding:.15rem .3rem}pre{white-space:pre-wrap}
details::details-content{content-visibility:visible;height:auto;block-size:auto}*{print-color-adjust:exact}}
"""

SCRIPT = """
"use strict";
document.documentElement.classList.add("js");
for (const b of document.querySelectorAll("button[data-copy]")) b.addEventListener("click", async () => {
  const from = document.getElementById(b.dataset.copy);
  const range = document.createRange(); range.selectNodeContents(from);
  const s = getSelection(); s.removeAllRanges(); s.addRange(range);
  try { await navigator.clipboard.writeText(from.textContent); b.textContent = "copied"; }
  catch { b.textContent = "selected: press Ctrl+C"; }
});
for (const i of document.querySelectorAll("input[data-filter]")) i.addEventListener("input", () => {
  const wanted = i.value.toLowerCase();
  for (const r of document.querySelectorAll("#" + i.dataset.filter + " tbody tr"))
    r.hidden = !r.textContent.toLowerCase().includes(wanted);
});
"""
