"""What TRL imports of vLLM, and TRL's client with a server and a wire in memory: it records what a server gets.

vLLM's CPU builds want another transformers. The wire is that of vLLM's packer: chunks of bytes, taken apart by the
names, dtypes and shapes of the request before them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


VERSION = "0.31.0"


def install(folder: Path) -> None:
    """Make ``import vllm`` work, and TRL take it for a version that it supports; before TRL is imported."""
    info = folder / f"vllm-{VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    (folder / "vllm").mkdir(exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    for name, contents in {
        "vllm": {"LLM": object, "RequestOutput": object, "SamplingParams": object},
        "vllm.sampling_params": {"StructuredOutputsParams": object},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": None},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": broadcast},
    }.items():
        module: Any = sys.modules.setdefault(name, ModuleType(name))
        module.__path__ = [str(folder / "vllm")]
        module.__spec__ = SimpleNamespace(name=name, submodule_search_locations=module.__path__)
        vars(module).update(contents)


def broadcast(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
    """As vLLM's: a chunk is a copy of all that is given, up to 1 GB.

    But it is made tensor by tensor: vLLM (0.32) makes it at the end, when TRL has taken adapters out again.
    """
    tensors = [post_iter_func(item).contiguous().view(-1).view(torch.uint8).clone() for item in iterator]
    group.chunks.append(torch.cat(tensors))


def recorder(prompt: list[int], completion: list[int]) -> Any:
    """A class in place of TRL's client. `syncs` of its instance: the tensors of each; `calls`: of the server."""
    from trl.generation.vllm_client import VLLMClient

    class Recorder(VLLMClient):
        def __init__(self, **_: Any) -> None:
            self.base_url = ""
            self.calls: list[str] = []
            self.syncs: list[dict[str, torch.Tensor]] = []
            self.chunks: list[torch.Tensor] = []
            self.communicator = self
            self._updating_weights = False
            self._announced: list[tuple[str, str, list[int]]] = []

        def init_communicator(self, device: Any = 0) -> None:
            pass

        def get_server_info(self) -> dict[str, Any]:
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
            self.calls.append(url.rpartition("/")[2])
            if self.calls[-1] == "update_weights":
                info = kwargs["json"]["update_info"]
                self._announced += zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
            elif self.calls[-1] == "finish_weight_update":
                self._take()
            return {}

        def _take(self) -> None:
            data = torch.cat(self.chunks)
            found, at = {}, 0
            for name, dtype, shape in self._announced:
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                found[name] = data[at : at + empty.nbytes].clone().view(empty.dtype).view(shape)
                at += empty.nbytes
            assert at == len(data)
            self.syncs.append(found)
            self.chunks, self._announced = [], []

        def generate(self, prompts: list[list[int]], n: int = 1, **_: Any) -> dict[str, Any]:
            count = n * len(prompts)
            numbers = [[token + number % 2 for token in completion] for number in range(count)]
            logprobs = [[[-1.0]] * len(completion)] * count
            return {
                "prompt_ids": prompts,
                "completion_ids": numbers,
                "logprobs": logprobs,
                "logprob_token_ids": [[[token] for token in each] for each in numbers],
            }

    return Recorder
