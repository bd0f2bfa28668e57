"""Builds stores from users' files, in bounded memory."""

from stores.ingest.build import ingest
from stores.ingest.spec import IngestResult, IngestSpec

__all__ = ["IngestResult", "IngestSpec", "ingest"]
