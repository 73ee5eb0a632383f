PRAGMA application_id = 1179932498;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE content (
        seq INTEGER PRIMARY KEY REFERENCES fires (seq) ON DELETE CASCADE,
        token_ids TEXT NOT NULL
    );
INSERT INTO "content" VALUES(1,'[1,2,49151]');
INSERT INTO "content" VALUES(2,'[]');
CREATE TABLE fires (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        created_ms INTEGER NOT NULL,
        last_seen_ms INTEGER NOT NULL,
        times INTEGER NOT NULL CHECK (times >= 1),
        source TEXT NOT NULL,
        model TEXT NOT NULL,
        stage TEXT NOT NULL,
        layer INTEGER,
        kind TEXT NOT NULL,
        phase TEXT NOT NULL,
        outcome TEXT NOT NULL,
        record TEXT NOT NULL
    );
INSERT INTO "fires" VALUES(1,'20261130-214415-3f9a2c41d7',1796075055123,1796075055123,1,'attach','SmolLM2-135M-Instruct','down',12,'nan','prefill','raised','{"id":"20261130-214415-3f9a2c41d7","created_at":"2026-11-30T21:44:15.123Z","source":"attach","runtime":"torch 2.13.0, transformers 5.24.0, Python 3.11.7","model":"SmolLM2-135M-Instruct","device":"x86_64","phase":"prefill","step":0,"origin":{"stage":"down","layer":12,"module":"model.layers.12.mlp.down_proj","legal":"finite","op":null,"source":null},"first":{"flat_index":10,"row":0,"column":10,"bits":2143289344,"dtype":"float32","kind":"nan","shape":[1,5,576],"sequence":null,"token":null,"position":null,"is_pad":null},"outcome":"raised","request":null,"bad_signals":[],"burned":[],"coverage":[0,0],"pad_before_real":false,"laundered":null,"inputs":[],"output":null,"weights":[],"notes":["the weight itself is non-finite"],"verdict":null,"token_ids":null,"count":1,"extra":{},"schema":1}');
INSERT INTO "fires" VALUES(2,'20261130-214501-00000000aa',1796075101000,1796075101000,42,'attach','café \udcff','swiglu',3,'nan','decode','isolated','{"id":"20261130-214501-00000000aa","created_at":"2026-11-30T21:45:01.000Z","source":"attach","runtime":"torch 2.13.0","model":"caf\u00e9 \udcff","device":"NVIDIA H200","phase":"decode","step":7,"origin":{"stage":"swiglu","layer":3,"module":"model.layers.3.mlp","legal":"finite","op":"aten.mul.Tensor","source":"model.py:120 in forward"},"first":{"flat_index":2,"row":0,"column":2,"bits":2144788480,"dtype":"float32","kind":"nan","shape":[1,4],"sequence":1,"token":0,"position":17,"is_pad":false},"outcome":"isolated","request":"chat-1","bad_signals":[{"signal":{"stage":"swiglu","layer":3,"module":"model.layers.3.mlp","legal":"finite","op":"aten.mul.Tensor","source":"model.py:120 in forward"},"status":"bad","first":{"flat_index":2,"row":0,"column":2,"bits":2144788480,"dtype":"float32","kind":"nan","shape":[1,4],"sequence":1,"token":0,"position":17,"is_pad":false},"first_pad":{"flat_index":2,"row":0,"column":2,"bits":2144788480,"dtype":"float32","kind":"nan","shape":[1,4],"sequence":1,"token":0,"position":17,"is_pad":false},"reason":null}],"burned":[{"sequence":1,"signal":{"stage":"swiglu","layer":3,"module":"model.layers.3.mlp","legal":"finite","op":"aten.mul.Tensor","source":"model.py:120 in forward"},"token":3,"column":2,"first":{"flat_index":2,"row":0,"column":2,"bits":2144788480,"dtype":"float32","kind":"nan","shape":[1,4],"sequence":1,"token":0,"position":17,"is_pad":false}}],"coverage":[7,9],"pad_before_real":true,"laundered":false,"inputs":[{"name":"x","shape":[1,4],"dtype":"float32","num_nan":1,"num_pos_inf":0,"num_neg_inf":0,"absmax":null,"zero_frac":0.5,"headroom":{"nonfinite":"+inf","bits":"7ff0000000000000"}}],"output":{"name":"x","shape":[1,4],"dtype":"float32","num_nan":1,"num_pos_inf":0,"num_neg_inf":0,"absmax":null,"zero_frac":0.5,"headroom":{"nonfinite":"+inf","bits":"7ff0000000000000"}},"weights":[{"name":"x","shape":[1,4],"dtype":"float32","num_nan":1,"num_pos_inf":0,"num_neg_inf":0,"absmax":null,"zero_frac":0.5,"headroom":{"nonfinite":"+inf","bits":"7ff0000000000000"}}],"notes":[],"verdict":{"family":"A","retriable":null},"token_ids":null,"count":1,"extra":{"scale":0.125},"schema":1}');
INSERT INTO "fires" VALUES(3,'imported-e0ae8d276450ce83',1796075160000,1796075160000,1,'import','unknown','logits',NULL,'-inf','unknown','imported','{"id":"imported-e0ae8d276450ce83","created_at":"2026-11-30T21:46:00Z","source":"import","runtime":"my-engine 1.0","model":"unknown","device":"unknown","phase":"unknown","step":-1,"origin":{"stage":"logits","layer":null,"module":"","legal":"finite or -inf","op":null,"source":null},"first":{"flat_index":4,"row":1,"column":1,"bits":64512,"dtype":"float16","kind":"-inf","shape":[2,3],"sequence":null,"token":null,"position":null,"is_pad":null},"outcome":"imported","request":null,"bad_signals":[],"burned":[],"coverage":[0,0],"pad_before_real":false,"laundered":null,"inputs":[],"output":null,"weights":[],"notes":[],"verdict":null,"token_ids":null,"count":1,"extra":{},"schema":1}');
CREATE INDEX fires_created ON fires (created_ms);
CREATE INDEX fires_last_seen ON fires (last_seen_ms);
CREATE INDEX fires_place ON fires (stage, layer);
COMMIT;
