"""Settings by topic, as the help of the commands and the configuration that `ooc init` writes list them."""

from collections.abc import Iterable, Mapping

Topics = Mapping[str, tuple[str, str]]
"""topic -> (names of the settings that the short help shows, names of the others)"""

TRAIN: Topics = {
    "Run": ("store out config resume seed", "log grown plan tensorboard checkpoint_every"),
    "Mode and batches": (
        "mode fanout batch_size sampler window num_neighbors",
        "layer_dependency batch_dependency importance stride by strategy replace weight_attr shuffle_block accumulate",
    ),
    "Subgraphs (--mode cluster, saint, history)": ("", "parts parts_per_batch saint roots walk_length saint_coverage"),
    "Histories (--mode history)": ("", "history history_dtype history_lag refresh drift_tolerance"),
    "Model": (
        "model hidden layers dropout",
        "pooling virtual_node norm model_args jk blocks init conv heads output_heads num_bases residual input_dropout alpha "
        "theta rescale groups update identity both_ways memory_dim time_dim past raw",
    ),
    "Task": ("task loss", "node_type edge_type huber_delta label_smoothing class_weights decoder exact_negatives"),
    "Tables (--mode table, lightgcn)": (
        "",
        "buckets resident chunk queries distance reciprocal margin temperature regularizer regularizer_weight "
        "relation_weight eval_candidates",
    ),
    "Events and links (--mode events, snapshots, --task link)": (
        "",
        "labels columns val test negatives ratio destinations live",
    ),
    "Optimization": (
        "epochs lr weight_decay max_steps",
        "optimizer momentum lr_schedule lr_warm_up lr_epochs lr_factor lr_patience updates grad_clip precision tf32 "
        "compress_gradients powersgd_rank",
    ),
    "Evaluation": (
        "monitor patience evaluate",
        "eval_every eval_splits train_split val_split eval_fanout eval_batch_size eval_negatives eval_ratio eval_k",
    ),
    "Machine": (
        "memory gpu_memory device threads",
        "sample_device sample_threads read_threads in_memory engine verify_reads cache_dir cache features placement disk pack "
        "activation_checkpointing compress compile",
    ),
}
"""settings of a run"""

INGEST: Topics = {
    "Edges": (
        "edges src dst weight time edge_features edge_label edge_split undirected reverse drop_missing",
        "time_unit header id_type drop_duplicates drop_self_loops edge_ids sorted",
    ),
    "Nodes": ("nodes id label split x_cols", "task one_hot codes birth num_nodes"),
    "Many graphs": ("graph_id graphs graph_label graph_split", ""),
    "Arrays": ("features labels train val test", "split_index"),
    "Random splits": ("random_split", "seed"),
    "Whole data sets": ("pyg arg ogb", "npz graphbolt"),
    "Storage": ("memory dtype reduce parts order", "normalize select partitioner allow_nan shard"),
}
"""settings of `ooc ingest` and `ooc append`"""


def common(topics: Topics) -> frozenset[str]:
    """Return the names that the short help shows."""
    return frozenset(name for names, _ in topics.values() for name in names.split())


def by_topic(names: Iterable[str], topics: Topics, other: str = "Other") -> dict[str, list[str]]:
    """Sort names into topics, in the order of the table; those that it does not name come last, as `other`.

    >>> by_topic(["lr", "store", "zeal"], TRAIN)
    {'Run': ['store'], 'Optimization': ['lr'], 'Other': ['zeal']}
    """
    left = list(names)
    sorted_names = {topic: [name for name in " ".join(own).split() if name in left] for topic, own in topics.items()}
    named = {name for own in sorted_names.values() for name in own}
    sorted_names[other] = [name for name in left if name not in named]
    return {topic: own for topic, own in sorted_names.items() if own}
