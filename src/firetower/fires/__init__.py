"""The store of fires: SQLite by default; migrations, queries, import and export. Torch-free."""

from firetower.fires.prune import PruneRule
from firetower.fires.query import FireFilter
from firetower.fires.safe import SafeStore
from firetower.fires.store import AddResult, Store

__all__ = ["AddResult", "FireFilter", "PruneRule", "SafeStore", "Store"]
