"""Growing stores: appends are kept in an LMDB environment that readers merge, until `compact` merges it into the arrays."""
