"""Builds stores from users' files, in bounded memory."""

from ooc.stores.ingest.build import ingest
from ooc.stores.ingest.spec import IngestResult, IngestSpec

__all__ = ["IngestResult", "IngestSpec", "ingest"]
