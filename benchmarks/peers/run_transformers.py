"""Runner: Hugging Face transformers, eager, attention by torch. --model is a Hugging Face folder; --kind a torch dtype.

Caches of decode cells hold random keys and values: what they contain changes no time.
"""

import line_loop
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


class Engine:
    def __init__(self, options: line_loop.Options) -> None:
        self._options = options
        torch.set_num_threads(self._options.threads)
        self._dtype = getattr(torch, self._options.kind)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=self._dtype, attn_implementation="sdpa")
        self._model = model.eval()

    def hello(self) -> line_loop.Hello:
        return line_loop.Hello(
            engine="transformers",
            version=f"{transformers.__version__}, torch {torch.__version__}",
            precision=self._options.kind,
            kv=self._options.kind,
            weight_bytes=sum(weight.numel() * weight.element_size() for weight in self._model.parameters()),
            note=f"eager, {torch.backends.cpu.get_cpu_capability()}",
        )

    def contexts(self, tokens: line_loop.Tokens) -> float:
        return 0.0

    @torch.inference_mode()
    def prefill(self, tokens: line_loop.Tokens) -> float:
        ids = torch.tensor(tokens)
        return line_loop.timed(lambda: int(self._next(ids, DynamicCache(config=self._model.config))[0]))[0]

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> float:
        config = self._model.config
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape, dtype=self._dtype), torch.randn(shape, dtype=self._dtype), layer)
        ids = self._next(torch.arange(100, 100 + batch)[:, None], cache)

        def go_on() -> list[int]:
            last = ids
            for _ in range(steps):
                last = self._next(last[:, None], cache)
            answer: list[int] = last.tolist()
            return answer

        return line_loop.timed(go_on)[0]

    def _next(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        """ids [B, n] after what the cache holds -> the likeliest next ids [B]."""
        answer = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        likeliest: Tensor = answer.logits[:, -1].argmax(-1)
        return likeliest

    @torch.inference_mode()
    def quality(self, tokens: line_loop.Tokens, path: str) -> float:
        seconds, logits = line_loop.timed(lambda: self._model(input_ids=torch.tensor(tokens)).logits.float().numpy())
        np.save(path, logits)
        return seconds


if __name__ == "__main__":
    line_loop.run(__doc__, Engine)
