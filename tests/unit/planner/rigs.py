"""A small model on small fleets, so that a search takes a second."""

from disagg.bench.workload import Lengths
from disagg.planner.estimate import Target
from disagg.planner.fleet import Fleet, make_gpus
from disagg.planner.search import Effort, Search
from disagg.planner.traffic import Traffic, drawn_traffic
from disagg.sim.hardware import catalogue
from disagg.sim.scenario import Slo

QUICK = Effort(num_requests=80, num_short_runs=1, num_runs=2, num_extra=2)


def fleet(num_gpus: int = 4, device: str = "h100", model: str = "Llama-3.1-8B", **more: object) -> Fleet:
    fields = {"model": catalogue.model_shape(model), "gpus": (make_gpus(device, num_gpus),)}
    return Fleet(**(fields | more))  # type: ignore[arg-type]


def traffic(rate_per_s: float = 10.0, prompt: float = 2000.0, output: float = 15.0, seed: int = 0) -> Traffic:
    asked, answered = Lengths(prompt, prompt / 3, is_lognormal=True), Lengths(output, output / 3)
    return drawn_traffic(rate_per_s, asked, answered, seed)


def search(num_gpus: int = 4, slo: Slo | None = None, seed: int = 0, **more: object) -> Search:
    asked = traffic(seed=seed)
    target = Target(slo or Slo(1.0, 0.02))
    fields = {"effort": QUICK, "seed": seed}
    return Search(fleet(num_gpus), asked, target, **(fields | more))  # type: ignore[arg-type]
