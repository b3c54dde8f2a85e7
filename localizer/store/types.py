"""What the records of a capture are made of: numbers, lists and tables of limited size."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_ITEMS = 100_000
"""Most items of a list or table in a document, where nothing else limits them."""

LEAST, MOST = -(1 << 63), (1 << 63) - 1

Integer = Annotated[int, msgspec.Meta(ge=LEAST, le=MOST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
TokenId = Count
Few = msgspec.Meta(max_length=MAX_ITEMS)
Texts = Annotated[list[str], Few]
TextTable = Annotated[dict[str, str], Few]
IntegerTable = Annotated[dict[str, Integer], Few]
