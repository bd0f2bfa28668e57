"""The command line: `ooc ingest`, `ooc train` and the other verbs. Each verb is one call into the packages below."""
