"""The only room that imports torch: weights, linears, attention, KV arena, sampler, model runner."""
