"""A configuration to begin with: one model, a prefill and a decode pool."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.write.yaml_writer import scalar_text
from baton.domain.errors import OperatorError
from baton.domain.names.words import count_text

TINY = "tiny"
_ONE_OF_EACH = 2


class NotEnoughGpus(OperatorError):
    """The fleet that was asked for needs more GPUs than there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """A fleet as a command line asks for it."""

    model: str
    """A hub id, a folder or `tiny`."""
    prefill: int = 1
    """Replicas of the prefill pool."""
    decode: int = 1
    """Replicas of the decode pool."""
    tp: int = 1
    """GPUs of a replica."""
    gpus_here: int = 0
    accelerator: str | None = None
    """Ray's name of the GPUs of another machine or of a cluster; None: those of this machine."""
    note: str = ""
    """A comment above the pools: where `tp` comes from."""

    @property
    def gpus(self) -> int:
        """GPUs of the whole fleet."""
        return (self.prefill + self.decode) * self.tp

    def render(self) -> str:
        """The commented YAML.

        Raises:
            NotEnoughGpus: this machine has GPUs, and too few of them.
        """
        return "\n".join([*self._head(), *self._model(), "", *self._pools(), "", *self._rest()])

    @property
    def _uses_gpus(self) -> bool:
        return self.accelerator is not None or (self.gpus_here > 0 and self.model != TINY)

    @property
    def _shares_one_gpu(self) -> bool:
        return self.accelerator is None and self.gpus_here == 1 and self.gpus == _ONE_OF_EACH

    def _head(self) -> list[str]:
        if not self._uses_gpus:
            where = "on the CPUs of this machine"
        elif self._shares_one_gpu:
            where = "on one GPU that both replicas share"
        else:
            noun = "GPU" if self.accelerator is None else f"{self.accelerator} GPU"
            where = f"on {count_text(self.gpus, noun)}"
        return [
            f"# {self.model} with separate prefill and decode pools, {where}.",
            "# All keys: baton config show -c FILE. Check: baton config validate -c FILE",
            "version: 1",
            "",
        ]

    def _model(self) -> list[str]:
        lines = ["model:", f"  source: {scalar_text(self.model)}"]
        if self._uses_gpus:
            return [
                *lines,
                "  # max_len: 16384     # prompt and output of a request; default: the model's",
            ]
        kv_cache = "256MiB" if self.model == TINY else "2GiB"
        return [
            *lines,
            "  max_len: 4096",
            f"  engine: {{dtype: bfloat16, block_size: 32, kv_cache: {kv_cache},"
            " extra: {enforce_eager: true}}",
        ]

    def _pools(self) -> list[str]:
        if not self._uses_gpus:
            resources, comment = "{cpus: 1}", ""
        elif self._shares_one_gpu:
            resources, comment = "{cpus: 1, gpus: 0.5}", "  # each takes half of the GPU"
        else:
            if self.accelerator is None and self.gpus > self.gpus_here:
                raise NotEnoughGpus(
                    f"GPUs: got {self.gpus_here} on this machine, expected at least {self.gpus} for"
                    f" {self.prefill} + {self.decode} replicas of {count_text(self.tp, 'GPU')}",
                    "ask for fewer with --prefill, --decode or --tp, or name the GPUs of a cluster:"
                    " --gpu H100",
                )
            name = "" if self.accelerator is None else f", accelerator: {self.accelerator}"
            resources, comment = f"{{cpus: 1, gpus: {self.tp}{name}}}", ""
        lines = [*([f"# {self.note}"] if self.note else []), f"pools:{comment}"]
        for pool, replicas in (("prefill", self.prefill), ("decode", self.decode)):
            lines += [
                f"  {pool}:",
                f"    role: {pool}",
                f"    replicas: {{initial: {replicas}}}",
                f"    resources: {resources}",
            ]
            if self.tp > 1:
                lines.append(f"    parallel: {{tp: {self.tp}}}")
        return lines

    def _rest(self) -> list[str]:
        slow = [] if self._uses_gpus and not self._shares_one_gpu else _SLOW_ENGINES
        return [
            "# Objectives: baton places, admits and scales by them.",
            "# slo: {default: {ttft: 500ms, tpot: 30ms}}",
            "# autoscaler: {policy: slo}     # and replicas: {min: 1, max: 4} in a pool",
            *slow,
            "server: {port: 8000}",
            "observability: {logs: {format: text}}",
            "",
        ]


_SLOW_ENGINES = [
    "",
    "# Engines here start and compute slowly: more time for a first token and for a transfer.",
    "admission: {timeouts: {first_token: 60s, resume: 120s}}",
    "transfer: {deadline: 10s, probe: {deadline: 10s}}",
]
