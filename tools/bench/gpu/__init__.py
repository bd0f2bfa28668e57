"""What a GPU does for `ooc`, in three commands of less than ten minutes each, on a machine with nothing but the environment.

    python -m tools.bench.gpu.rates WORK --out OUT
    python -m tools.bench.gpu.training WORK --fanout 10,10 --out OUT
    python -m tools.bench.gpu.training WORK --fanout 15,10,5 --out OUT

Each makes what it needs in WORK (a file of 8 GB; a graph of 8 M nodes x 128 and 80 M edges, kept for the next command where
the machine is the same), writes OUT/NAME.json and prints a table. `pytest tests/gpu` beside the first checks what they measure.

Where packages cannot be fetched, a folder of wheels is carried: `pip download --no-deps --only-binary=:all: -d .whl NAME ...`
for that machine's Python, of what it lacks of `pyproject.toml`. Beside torch, PyG, numba and pyarrow these are zarr, donfig,
numcodecs, msgspec, google-crc32c, lmdb, duckdb, pydantic, pydantic-core, annotated-types and typing-inspection, for GPUDirect
kvikio-cu13, libkvikio-cu13 and rapids-logger, and for tests pytest-timeout: 34 MB. There
`pip install --no-index --no-deps --target /tmp/site .whl/*.whl && export PYTHONPATH=/tmp/site:$PWD`.
"""
