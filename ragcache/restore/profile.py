"""What a machine achieves at the things that restoring is made of: rates of its disks, links and processors.

The plan of restoring rests on measured rates, as in HCache (EuroSys'25, section 4.1), and so do its predictions.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ragcache.errors import ProfileError


def _dated(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a date needs a time zone")
    return text


Rate = Annotated[float, Field(ge=1, le=1e18)]
Text = Annotated[str, Field(min_length=1)]
Date = Annotated[str, AfterValidator(_dated)]


@dataclass(frozen=True)
class Profile:
    """Rates of one machine for one model; all that a plan needs to know of hardware.

    Attributes:
        read_rate: bytes per second that the state folders give together.
        transfer_rate: bytes per second from the host to the device; `None` where states are decoded in place.
        projection_rate: FLOP/s of the product `[tokens, hidden_size] x [hidden_size, 2 * kv_heads * head_dim]`.
        prefill_rate: FLOP/s of whole layers in a prefill.
        placement_rate: bytes per second written while states are decoded, rotated and put into the KV cache: those of
            the decoded states and those of the KV.
        codec: whose decoding is in `placement_rate`.
        device: `cpu` or `cuda`.
        machine: names of the processors.
        fingerprint: digest of the model's fingerprint.
        measured: when, ISO 8601 with time zone.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    read_rate: Rate
    transfer_rate: Rate | None
    projection_rate: Rate
    prefill_rate: Rate
    placement_rate: Rate
    codec: Text
    device: Text
    machine: Text
    fingerprint: Text
    measured: Date

    @property
    def date(self) -> datetime:
        """When it was measured."""
        return datetime.fromisoformat(self.measured)

    @property
    def input_rate(self) -> float:
        """Bytes per second from the disks to where states are decoded.

        Reading and transfer run at once, one layer behind the other, so the slower of the two decides.
        """
        return min(self.read_rate, self.transfer_rate or math.inf)

    def to_json(self) -> str:
        """One JSON object, for people to read and to change."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Inverse of `to_json`.

        Raises:
            ProfileError: not a profile; names the first field at fault.
        """
        try:
            return _READER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            message = first["msg"][:1].lower() + first["msg"][1:]
            raise ProfileError(f"not a profile: {f'{field!r}: ' if field else ''}{message}") from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile from a file.

        Raises:
            ProfileError: the file cannot be read or is no profile.
        """
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise ProfileError(f"the profile {path} cannot be read: {error.strerror or error}") from error
        except ProfileError as error:
            raise ProfileError(f"{path} is {error}; take `profile` from ragcache plan --json") from error


_READER = TypeAdapter(Profile)
