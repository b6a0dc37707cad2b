"""The parameters of a plan by name, and the flags of ``kvservice plan``: one a parameter."""

import argparse

MODEL_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
}
"""What a query says of a model, and what its config.json calls that."""
ROUND_NAMES = ("agents", "tokens", "private_share", "refresh_ratio")
SPEED_NAMES = ("prefill_tokens_per_s", "flops")
NAMES = ("host", "ssd", "dwpd", "tenant", "namespace", "dtype", *MODEL_NAMES, *ROUND_NAMES, *SPEED_NAMES)
HELP = {
    "host": "memory, such as 2x, +64GiB or 512GiB",
    "ssd": "SSD tier, likewise",
    "dwpd": "whole writes a day that the SSD is rated for (1)",
    "tenant": "of this tenant's lookups alone",
    "namespace": "of this namespace's, 64 hexadecimal digits",
    "dtype": "of the KV cache: bfloat16, float16, float32, fp8",
    "agents": "of a round (10)",
    "tokens": "of an agent's prompt (8192)",
    "private_share": "of a prompt that is its agent's own (0.1)",
    "refresh_ratio": "of the shared tokens that are computed anew (0.05)",
    "prefill_tokens_per_s": "how fast prefill is",
    "flops": "or what the accelerator really does a second, such as 4e14",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a parameter of GET /plan."""
    parser.add_argument(
        "--model", metavar="CONFIG.JSON", help="answer from closed forms for this model, without a node"
    )
    for name in NAMES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, dest=f"plan_{name}", metavar="VALUE", help=HELP.get(name, "of the model, without a file")
        )
    parser.add_argument("--json", action="store_true", help="the whole answer, for programs")
