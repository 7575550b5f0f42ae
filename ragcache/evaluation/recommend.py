"""Which setting to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.evaluation.grid import Setting
from ragcache.evaluation.summary import Summary
from ragcache.states.store import StateStore, hold_lock


@dataclass(frozen=True)
class Recommendation:
    """The fastest setting that is good enough, or the best one if none is.

    Attributes:
        target: agreement that was asked for.
        summary: figures of the setting.
        runner_up: the fastest of the others that are good enough.
        current: figures of the store's present setting, if it was among those measured.
    """

    target: float
    summary: Summary
    runner_up: Summary | None
    current: Summary | None

    @property
    def met(self) -> bool:
        """Whether the setting is good enough."""
        return self.summary.agreement.mean >= self.target

    @property
    def lines(self) -> list[str]:
        """For people: what is recommended, and by how much it is better than what."""
        it = self.summary
        figures = (
            f"agreement {it.agreement.mean:.3f} ({it.agreement.low:.3f} to {it.agreement.high:.3f}), "
            f"KL {it.kl.mean:.4f}, TTFT {it.ttft_ms:,.0f} ms"
        )
        if not self.met:
            return [
                f"no setting has an agreement of {self.target:g}; nearest is {it.setting.label}: {figures}",
                "try a larger --repair-ratio, an index with --encodings alone,context, or a lower target",
            ]
        lines = [
            f"recommended for an agreement of {self.target:g}: {it.setting.label}",
            f"{figures}, {it.speedup:.1f} times sooner than a full prefill",
        ]
        if it.agreement.low < self.target:
            lines.append("with other questions it may fall short: the interval begins below the target")
        if self.runner_up is not None:
            faster = self.runner_up.ttft_ms - it.ttft_ms
            lines.append(f"{faster:,.0f} ms sooner than the next that meets it, {self.runner_up.setting.label}")
        if self.current is not None and self.current is not it:
            lines.append(
                f"the store's setting now, {self.current.setting.label}: agreement {self.current.agreement.mean:.3f}, "
                f"TTFT {self.current.ttft_ms:,.0f} ms"
            )
        return lines


def recommend(summaries: Sequence[Summary], target: float, current: Summary | None = None) -> Recommendation:
    """The fastest setting, by measured TTFT, whose mean agreement is at least the target; else that of the highest
    agreement.

    Args:
        summaries: of all settings measured, at least one.
        target: agreement with the full prefill's most probable token.
        current: figures of the store's present setting.
    """
    good = sorted((it for it in summaries if it.agreement.mean >= target), key=lambda it: it.ttft_ms)
    if good:
        return Recommendation(target, good[0], good[1] if len(good) > 1 else None, current)
    nearest = max(summaries, key=lambda it: (it.agreement.mean, -it.ttft_ms))
    return Recommendation(target, nearest, None, current)


def apply(store: StateStore, setting: Setting) -> None:
    """Make a setting the store's default, in its `store.toml`.

    Raises:
        StoreLockedError: another process is writing to the store.
        StoreError: the file cannot be written.
    """
    without = {"codec"} if setting.codec is None else set()
    if setting.repair == "off":
        # How much to repair stays for those who ask for it.
        without |= {"repair_ratio", "repair_ms"}
    elif setting.repair_ms is not None:
        without |= {"repair_ratio"}
    with hold_lock(store.path):
        store.change_settings(setting.model_dump(mode="json", exclude=without))
