"""T5: the rows of NVIDIA's published training throughput."""

from __future__ import annotations

from simulator.validate.published import Case, Row
from simulator.validate.scenarios import Table, described, gpt, nodes_of, overlapped, step_seconds

VOCAB = 29184
"""28,996 tokens of BERT's cased vocabulary and 100 that stand for spans, padded to 128."""

MICROBATCH = {"220M": 64, "3B": 27}
"""220m.yaml's; of 3B a rank's share of 2,160 samples on 20 nodes, as 3b.yaml's 24 is of 1,920."""

BATCH = 2160
"""Where the source prints none: what it prints of the same model and as many nodes."""


def nemo_t5(row: Row) -> Case:
    """Tokens/s of all GPUs, those of the encoder alone, as seconds of a step."""
    ranks, tp, layers = 8 * int(row["n_nodes"]), int(row["tp"]), int(row["layers"])
    batch, length = int(row["gbs"] or BATCH), int(row["seq_len"])
    model: Table = gpt(row, VOCAB, length) | {
        "name": "t5", "intermediate_size": int(row["intermediate"]), "gated_mlp": True,
        "num_hidden_layers": 2 * layers, "num_decoder_layers": layers, "head_bias": True,
    }  # fmt: skip
    plan = {
        "dp": ranks // tp, "tp": tp, "microbatch_size": MICROBATCH[row["model"]], **overlapped(row),
    }  # fmt: skip
    run = {
        "global_batch_size": batch, "sequence_length": length,
        "decoder_sequence_length": int(row["seq_len_decoder"]), "precision": "bf16",
        "gradient_dtype": "fp32", "attention": "unfused", "clip_grad": True,
    }  # fmt: skip
    s = described(model, nodes_of(ranks, "dgx-a100"), plan, run)
    return Case(batch * length / float(row["tokens_per_s"]), s, lambda: step_seconds(s))
