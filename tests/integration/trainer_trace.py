"""Run the trainer in this process and print, as JSON, the metrics of every step and a hash of the final weights.

usage: python -m tests.integration.trainer_trace --job.config_file CONFIG [--section.field value ...]
"""

import hashlib
import json
import os
import socket
import sys

from harts_titan import train


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    steps = []
    digest = hashlib.sha256()

    class Traced(train.HartsTrainer):
        def __init__(self, config):
            super().__init__(config)
            update = self.engine.update

            def traced(batch):
                metrics = update(batch)
                steps.append({name: value.hex() for name, value in metrics.items()})
                return metrics

            self.engine.update = traced

        def close(self):
            for name, tensor in sorted(self.model_parts[0].state_dict().items()):
                digest.update(name.encode())
                tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
            super().close()

    train.HartsTrainer = Traced
    train.main()
    sys.stdout.write("\nTRACE " + json.dumps({"steps": steps, "weights": digest.hexdigest()}) + "\n")


if __name__ == "__main__":
    main()
