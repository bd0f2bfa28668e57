"""The command line: `ooc ingest`, `ooc train` and the other verbs, each a single call into the packages below."""
