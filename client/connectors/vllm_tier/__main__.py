"""Prints what a tier must be told of an engine, to be put into its entry in ``secondary_tiers``.

    python -m kvservice.client.connectors.vllm_tier --model MODEL [the other flags of the engine]

Takes the flags of `vllm serve`, since overrides, types and revisions change what is in a chunk. Imports vLLM.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from kvservice.client.connectors.vllm.engine_identity import UnnamedWeightsError, config_digest, weights_name


def identity_options(model_config: Any, load_config: Any) -> dict[str, str]:
    """The options from vLLM's ``ModelConfig`` and ``LoadConfig``. Raises UnnamedWeightsError."""
    return {
        "weights": weights_name(model_config, load_config),
        "config": config_digest(model_config),
        "quantization": str(model_config.quantization or "none"),
    }


def main(arguments: Sequence[str]) -> int:
    """Print the options as JSON, and nothing else, to standard output; 1 if the weights have no name."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to where standard output is when it is imported
            options = _options_of(arguments)
    except UnnamedWeightsError as error:
        sys.stderr.write(f'{error}; give "weights" yourself, a name that changes with the weights\n')
        return 1
    sys.stdout.write(json.dumps(options, indent=2) + "\n")
    return 0


def _options_of(arguments: Sequence[str]) -> dict[str, str]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="kvservice.client.connectors.vllm_tier"))
    engine = EngineArgs.from_cli_args(parser.parse_args(list(arguments)))
    return identity_options(engine.create_model_config(), engine.create_load_config())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
