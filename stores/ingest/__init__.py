"""Builds stores from users' files, in bounded memory."""

from ooc.stores.ingest.build import ingest
from ooc.stores.ingest.join import join
from ooc.stores.ingest.spec import IngestResult, IngestSpec
from ooc.stores.ingest.typed_spec import HeteroSpec, spec_of

__all__ = ["HeteroSpec", "IngestResult", "IngestSpec", "ingest", "join", "spec_of"]
