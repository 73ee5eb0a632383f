"""Every checker of the contracts, on a small bad source that it must refuse and a good one that passes."""

from __future__ import annotations

import pytest
from contracts import imports, names, style


@pytest.mark.parametrize(
    ("path", "source", "breach"),
    [
        ("firetower/core/a.py", "from firetower.fires.store import Store", "core imports fires"),
        ("firetower/core/a.py", "def f():\n    import firetower.attach.watch", "core imports attach"),
        ("firetower/fires/a.py", "from firetower.scan import gguf", "fires imports scan"),
        ("firetower/scan/a.py", "from firetower import fires", "scan imports fires"),
        ("firetower/scan/a.py", "from ..attach import watch", "scan imports attach"),
        ("firetower/sensors/a.py", "from firetower import Store", "sensors imports the whole package"),
        ("firetower/sensors/a.py", "import firetower", "sensors imports the whole package"),
        ("firetower/attach/a.py", "from firetower import Store", "attach imports the whole package"),
        ("firetower/scan/sub/a.py", "from ...drills import b", "scan imports drills"),
        ("firetower/scan/__init__.py", "from ..drills import b", "scan imports drills"),
        (
            "firetower/core/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from firetower.attach.watch import W",
            "core imports attach",
        ),
        ("firetower/cellar/a.py", "", "room cellar is not in the order"),
    ],
)
def test_upward_and_sideways_imports_are_refused(path, source, breach):
    [found] = imports.upward_imports({path: source})
    assert breach in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("firetower/cli/a.py", "from firetower.drills import all_drills\nfrom firetower.core.bits import x"),
        ("firetower/scan/a.py", "from firetower.scan.gguf import read\nfrom .records import F\nimport numpy"),
        ("firetower/attach/a.py", "from firetower.sensors import check\nfrom firetower.fires.store import S"),
        ("firetower/__init__.py", "from firetower.attach.watch import attach"),
        ("firetower/drills/a.py", "import firetower\nfrom firetower import attach, Fire"),
    ],
)
def test_downward_imports_pass(path, source):
    assert imports.upward_imports({path: source}) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("firetower/core/a.py", "import torch"),
        ("firetower/fires/a.py", "def f():\n    import torch"),
        ("firetower/scan/gguf.py", "def f():\n    from torch import nn"),
        ("firetower/scan/pytorch.py", "import torch"),
        ("firetower/cli/a.py", "from transformers import AutoModel"),
        ("firetower/cli/a.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("firetower/core/a.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch.nn"),
    ],
)
def test_torch_in_a_torch_free_room_is_refused(path, source):
    [found] = imports.torch_in_torch_free_rooms({path: source})
    assert "is torch-free and imports" in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("firetower/scan/pytorch.py", "def f():\n    import torch"),
        ("firetower/cli/a.py", "def run(args):\n    import torch"),
        ("firetower/core/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("firetower/attach/a.py", "import torch"),
        ("firetower/core/a.py", "import torchlight"),
    ],
)
def test_torch_where_it_may_be_passes(path, source):
    assert imports.torch_in_torch_free_rooms({path: source}) == []


def test_slow_imports_of_the_command_line_are_refused():
    sources = {
        "firetower/cli/a.py": "import numpy as np\nfrom rich.table import Table",
        "firetower/cli/b.py": "def run(args):\n    import numpy",
        "firetower/__init__.py": "import sqlite3",
        "firetower/scan/a.py": "import numpy",
    }
    found = imports.slow_imports_at_start(sources)
    assert [f.split(": ")[0] for f in found] == [
        "firetower/cli/a.py:1",
        "firetower/cli/a.py:2",
        "firetower/__init__.py:1",
    ]


def test_long_files_are_refused():
    assert style.long_files({"a.py": "x = 1\n" * 800}) == []
    assert style.long_files({"a.py": "x = 1\n" * 801}) == ["a.py: 801 lines, at most 800"]


def function(num_lines: int, name: str = "f", doc: str = "") -> str:
    return f"def {name}():\n{doc}" + "    x = 1\n" * (num_lines - 1)


def test_long_functions_are_refused_but_kernels():
    assert style.long_functions({"a.py": function(80)}) == []
    assert style.long_functions({"a.py": function(81)}) == ["a.py:1 f: 81 lines, at most 80"]
    assert style.long_functions({"a.py": function(200, "norm_fwd_kernel")}) == []


def test_docstrings_do_not_count_as_length():
    doc = '    """One.\n' + "    more\n" * 50 + '    """\n'
    assert style.function_sizes({"a.py": function(10, doc=doc)}) == {"a.py:1 f": 10}


def test_functions_over_45_lines_must_stay_rare():
    few = "\n".join(function(5, f"s{i}") for i in range(100)) + "\n" + function(60, "long0")
    assert style.long_functions({"a.py": few}) == []
    many = few + "\n".join(function(60, f"long{i}") for i in range(1, 6))
    [found] = style.long_functions({"a.py": many})
    assert found.startswith("6 of 106 functions are over 45 lines")


def test_missing_docstrings_are_refused():
    lines = ['"""M."""', "def f(): pass", "class C:", '    """C."""', "    def g(self): pass"]
    lines += ["    def _h(self): pass", "def _p(): pass"]
    found = style.missing_docstrings({"a.py": "\n".join(lines)})
    assert found == ["a.py:2: f has no docstring", "a.py:5: C.g has no docstring"]
    assert style.missing_docstrings({"a.py": "x = 1"}) == ["a.py: the module has no docstring"]


@pytest.mark.parametrize(
    ("source", "breach"),
    [
        ("import pickle", "imports pickle"),
        ("from pickle import loads", "imports pickle"),
        ("import torch\ntorch.load(p)", "torch.load without weights_only"),
        ("import torch\ntorch.load(p, weights_only=False)", "torch.load without weights_only"),
        ("np.load(p, allow_pickle=True)", "allow_pickle"),
        ("try:\n    f()\nexcept Exception:\n    pass", "swallows every error"),
        ("try:\n    f()\nexcept (ValueError, Exception):\n    ...", "swallows every error"),
        (
            "for x in y:\n    try:\n        f()\n    except BaseException as e:\n        continue",
            "swallows every",
        ),
        ("try:\n    f()\nexcept:\n    raise", "bare except"),
    ],
)
def test_forbidden_constructs_are_refused(source, breach):
    [found] = style.forbidden_constructs({"a.py": source})
    assert breach in found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(p, map_location='cpu', weights_only=True)",
        "np.load(p, allow_pickle=False)",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "try:\n    f()\nexcept Exception as e:\n    log(e)",
    ],
)
def test_their_allowed_cousins_pass(source):
    assert style.forbidden_constructs({"a.py": source}) == []


def test_variables_are_compared_three_ways():
    table = 'ENVIRONMENT: dict[str, str] = {"FIRETOWER_A": "x", "FIRETOWER_B": "y"}\n'
    read = names.variables_read({"a.py": table + 'f("FIRETOWER_A")\nf("FIRETOWER_C")\nf("FIRETOWER_")\n'})
    assert read == {"FIRETOWER_A", "FIRETOWER_C"}
    page = "| `FIRETOWER_A` | a |\n| `FIRETOWER_D` | d |\n"
    assert names.variable_breaches(read, ["FIRETOWER_A", "FIRETOWER_B"], page) == [
        "FIRETOWER_C: read by the code, not in ENVIRONMENT",
        "FIRETOWER_B: in ENVIRONMENT, read nowhere",
        "FIRETOWER_B: in ENVIRONMENT, not documented",
        "FIRETOWER_D: documented, not in ENVIRONMENT",
    ]
    assert names.variable_breaches(["FIRETOWER_A"], ["FIRETOWER_A"], "| `FIRETOWER_A` | a |") == []


def test_the_public_api_and_its_page_are_compared_both_ways():
    page = "# API\n### `attach`\ntext `other`\n### `gone`(x)\n"
    assert names.api_breaches(["attach", "new"], page) == [
        "new: exported, has no heading ### `new`",
        "gone: documented, not exported",
    ]


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_machine_paths_are_refused(folder):
    found = names.machine_paths({"a.md": f"ok\nsee /{folder}/someone/x"})
    assert found == [f"a.md:2: see /{folder}/someone/x"]


@pytest.mark.parametrize("line", ["https://a.org/home/page", "~/work/x", "network/root/a", "a / root / b"])
def test_other_slashes_pass(line):
    assert names.machine_paths({"a.md": line}) == []


def test_a_stage_without_a_drill_is_refused():
    assert names.stages_without_drill(["down", "router"], [{"down"}, set()]) == [
        "router: declared by landed code, no drill originates there"
    ]
    assert names.stages_without_drill(["down"], [{"down", "up"}]) == []


def test_a_room_must_teach_how_to_add_one():
    assert names.readme_breaches("core", None) == ["core: has no README.md"]
    assert names.readme_breaches("core", "# core\nAdding one is easy") == [
        "core: README.md has no heading 'Adding one'"
    ]
    assert names.readme_breaches("core", "# core\n\n## Adding one\n") == []


def test_an_op_without_its_parts():
    whole = set(names.OP_FILES)
    assert names.incomplete_ops({"moe": whole}, {"moe"}, {"moe"}) == []
    assert names.incomplete_ops({"moe": whole - {"reference.py"}}, {"moe"}, {"moe"}) == ["moe: has no reference.py"]
    assert names.incomplete_ops({"moe": whole - {"cases.py"}}, {"moe"}, {"moe"}) == ["moe: has no cases.py"]
    assert names.incomplete_ops({"moe": whole}, set(), {"moe"}) == ["moe: no page docs/reference/ops/moe.md"]
    assert names.incomplete_ops({"moe": whole}, {"moe"}, set()) == ["moe: no folder tests/ops/moe"]
