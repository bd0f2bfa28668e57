"""From the files people have to a finished store, in bounded memory."""

from stores.ingest.build import ingest
from stores.ingest.spec import IngestResult, IngestSpec

__all__ = ["IngestResult", "IngestSpec", "ingest"]
