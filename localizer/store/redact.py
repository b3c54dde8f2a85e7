"""What stands for tokens, prefixes and digests in a redacted capture: keyed, and the key is not told.

A prefix, or the digest of an input id, is the plain hash of a few token ids: whoever tries all tokens of a
vocabulary, position after position, finds the prompt. So both are replaced by keyed hashes, which are equal
where the originals are: all that pairing and comparing ask of them.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TypeVar

import msgspec
import numpy as np

from localizer.errors import LocalizerError
from localizer.store import scrub
from localizer.store.expected import is_draft
from localizer.store.prefix import prefix_digest, prefix_digests
from localizer.store.reader import Capture
from localizer.store.schema import (
    DIGEST_BYTES,
    JOURNAL,
    LOG,
    MANIFEST,
    OPEN,
    HiddenPrompt,
    Manifest,
    Open,
    Output,
    token_ids,
)
from localizer.store.trace import StepTrace
from localizer.wire import ranks
from localizer.wire.spec import DRAFT, INPUT_IDS, TOKEN

TOKEN_SITES = frozenset({INPUT_IDS, DRAFT + INPUT_IDS, TOKEN})
"""Sites whose rows are token ids, as they are called on a single worker."""

LEFT_OUT = (
    "prompts",
    "token ids but for those that the witness requests generated",
    "host and user names, absolute paths, GPU UUIDs",
    "environment variables beyond the allow-list",
    "log.txt",
    "prefixes, and digests of rows whose payload is not kept, are replaced by keyed ones",
)

BY_SITE = frozenset({"not_applicable", "untapped", "code", "kv_contents"})
"""Tables whose keys are names of sites or layers."""

KEPT_OPEN = frozenset({"format", "name", "host", "workload", "environment", "observer", "reduced"})
KEPT_MANIFEST = frozenset({"format", "state", "outputs", "sites", "coverage", "files", "weights"})
"""Fields that hold neither names nor paths, or are seen to by themselves."""

T = TypeVar("T", bound=msgspec.Struct)

LOG_TEXT = "The log was left out by localize attach --redact.\n"


def holds_tokens(site: str) -> bool:
    """Whether the rows of a site, of whatever rank, are token ids."""
    return ranks.base(site) in TOKEN_SITES


class Redactor:
    """Replaces what must not be told, in all captures of one archive alike.

    Args:
        captures: all captures of the archive, none of them redacted before.
        witnesses: request ids of each capture whose generated tokens are told, and with them those of all
            requests of the same prompt.
    """

    def __init__(self, captures: Sequence[Capture], witnesses: Sequence[Collection[str]]) -> None:
        self._key = _key(captures)
        self.key = self._mac(b"name", b"", 8).hex()
        self._prompts = {
            id(prompt): prefix_digest(token_ids(prompt))
            for capture in captures
            for prompt in capture.prompts.values()
        }
        self._captures = captures  # keeps the prompts, and so their ids
        self._witnesses = {
            self._prompts[id(capture.prompts[request])]
            for capture, requests in zip(captures, witnesses, strict=True)
            for request in requests
        }
        self._told: dict[str, set[bytes]] = {site: set() for site in TOKEN_SITES}
        for capture in captures:
            self._tell(capture)
        names = set[str]()
        for capture in captures:
            names |= {name for name in (capture.open.host.get("name", ""),) if name}
            names |= {name.partition(".")[0] for name in names}
            names |= scrub.people(msgspec.to_builtins(capture.open))
            if capture.manifest is not None:
                facts = msgspec.structs.replace(capture.manifest, outputs=[], weights=None, files=[])
                names |= scrub.people(msgspec.to_builtins(facts))
                identity = capture.manifest.identity
                names |= {gpu.uuid for gpu in identity.gpus} if identity is not None else set()
                names |= {gpu.uuid for gpu in capture.manifest.gpu_memory if gpu.uuid}
        self._scrub = scrub.Scrubber(self._tag, names - scrub.GENERIC)

    def _mac(self, what: bytes, blob: bytes, size: int = DIGEST_BYTES) -> bytes:
        return hashlib.blake2b(blob, key=self._key, person=what, digest_size=size).digest()

    def _tag(self, text: str) -> str:
        return self._mac(b"text", text.encode("utf-8", "surrogatepass"), 4).hex()

    # -- rows ------------------------------------------------------------------------------------------

    def witnessed(self, capture: Capture) -> np.ndarray:
        """Bool [requests]: whose generated tokens are told."""
        return np.array(
            [self._prompts[id(capture.prompts[name])] in self._witnesses for name in capture.requests],
            np.bool_,
        )

    def _tell(self, capture: Capture) -> None:
        """Note the prefixes of the rows whose token ids are told, by site."""
        columns, prefix = capture.table.columns, capture.table.prefix
        lengths = np.array([len(capture.prompts[name]) for name in capture.requests], np.int64)
        beyond = columns["position"] - lengths[columns["request"]]
        ours = self.witnessed(capture)[columns["request"]] & prefix.any(axis=1)
        for site, least in ((INPUT_IDS, 0), (DRAFT + INPUT_IDS, 0), (TOKEN, -1)):
            rows = ours & (beyond >= least) & (is_draft(columns) == site.startswith(DRAFT))
            self._told[site] |= {bytes(row) for row in prefix[rows]}

    def told(self, site: str, prefix: np.ndarray) -> np.ndarray:
        """Bool [rows]: which rows of a site of token ids may be told, by their (original) prefixes."""
        told = self._told[ranks.base(site)]
        return np.array([bytes(row) in told for row in prefix], np.bool_)

    def prefixes(self, prefix: np.ndarray) -> np.ndarray:
        """uint8 [rows, 16]: keyed prefixes; those that are not known stay zero."""
        found = np.zeros_like(prefix)
        for row in np.flatnonzero(prefix.any(axis=1)).tolist():
            found[row] = np.frombuffer(self._mac(b"prefix", prefix[row].tobytes()), np.uint8)
        return found

    def digests(
        self,
        sites: Sequence[str],
        digest: np.ndarray,
        present: np.ndarray,
        prefix: np.ndarray,
        kept: Collection[bytes],
    ) -> np.ndarray:
        """uint8 [rows, sites, 16]: keyed digests but for those of `kept` rows, which anyone can take.

        Rows of equal prefix have equal ones where the originals are equal; others tell nothing of each other.
        """
        found = np.array(digest)
        for column, site in enumerate(sites):
            rows = np.flatnonzero(present[:, column])
            plain = self.told(site, prefix[rows]) if holds_tokens(site) else None
            for number, row in enumerate(rows.tolist()):
                old = digest[row, column].tobytes()
                if plain[number] if plain is not None else old in kept:
                    continue
                new = self._mac(b"digest", prefix[row].tobytes() + old)
                found[row, column] = np.frombuffer(new, np.uint8)
        return found

    def columns(
        self, capture: Capture, columns: Mapping[str, np.ndarray], prefix: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The columns of a row table with other `token` and `sampled`."""
        found = {name: np.array(column) for name, column in columns.items()}
        told = self.told(INPUT_IDS, prefix) & ~is_draft(columns)
        found["token"][~told] = -1
        for row in np.flatnonzero(columns["sampled"] >= 0).tolist():
            request = capture.requests[columns["request"][row]]
            token, position = int(columns["sampled"][row]), int(columns["position"][row])
            if is_draft({"kind": columns["kind"][row : row + 1]})[0]:
                if not self.told(DRAFT + INPUT_IDS, prefix[row : row + 1])[0]:
                    found["sampled"][row] = self._pseudonym(prefix[row].tobytes(), 0, token)
            else:
                index = position + 1 - len(capture.prompts[request])
                found["sampled"][row] = self._generated(capture, request, index, token)
        return found

    def _generated(self, capture: Capture, request: str, index: int, token: int) -> int:
        """What stands for output token `index` of a request: equal only for requests of equal prompt."""
        prompt = self._prompts[id(capture.prompts[request])]
        return token if prompt in self._witnesses else self._pseudonym(prompt, index, token)

    def _pseudonym(self, where: bytes, index: int, token: int) -> int:
        number = index.to_bytes(8, "little", signed=True) + token.to_bytes(8, "little", signed=True)
        return int.from_bytes(self._mac(b"token", where + number, 8), "big") >> 1

    def steps(self, traces: Sequence[StepTrace]) -> list[StepTrace]:
        """The schedule trace with keyed digests of KV contents."""

        def keyed(table: Mapping[str, list[str]]) -> dict[str, list[str]]:
            return {
                layer: [self._mac(b"cache", item.encode()).hex() for item in items]
                for layer, items in table.items()
            }

        return [
            msgspec.structs.replace(
                trace,
                keys=keyed(trace.keys),
                values=keyed(trace.values),
                backend=self._scrub.tree(trace.backend),
            )
            for trace in traces
        ]

    # -- documents -------------------------------------------------------------------------------------

    def opening(self, facts: Open) -> Open:
        """open.json without prompts, names, paths and most of the environment."""

        @cache
        def hidden(number: int) -> HiddenPrompt:
            tokens = token_ids(facts.workload.prompts[number])
            table = np.frombuffer(prefix_digests(tokens), np.uint8).reshape(-1, DIGEST_BYTES)
            return HiddenPrompt(prefixes=base64.b64encode(self.prefixes(table).tobytes()).decode())

        work = facts.workload
        return msgspec.structs.replace(
            self._scrubbed(facts, KEPT_OPEN),
            host={name: self._scrub.text(value) for name, value in facts.host.items() if name != "name"},
            workload=msgspec.structs.replace(
                self._scrubbed(work, {"prompts"}),
                prompts=[hidden(number) for number in range(len(work.prompts))],
            ),
            environment=self._scrub.environment(facts.environment),
            observer=msgspec.structs.replace(
                facts.observer, changes=[self._change(change) for change in facts.observer.changes]
            ),
        )

    def _scrubbed(self, record: T, kept: Collection[str]) -> T:
        """A record without names and paths in any of its fields but those kept.

        Raises:
            LocalizerError: a name to be taken out is a word that the record needs.
        """
        found = {}
        for field in msgspec.structs.fields(record):
            value = getattr(record, field.name)
            if field.name in BY_SITE:
                found[field.name] = self._scrub.values(value)
            elif field.name not in kept:
                try:
                    plain = self._scrub.tree(msgspec.to_builtins(value))
                    found[field.name] = msgspec.convert(plain, field.type)
                except msgspec.ValidationError:
                    raise LocalizerError(
                        "A machine or a person is called as a word of the records, so its name cannot be "
                        "taken out of them; give --no-redact, and look at what they hold."
                    ) from None
        return msgspec.structs.replace(record, **found)

    def _change(self, change: str) -> str:
        found = re.fullmatch(r"environment: (\w+)(=.*| .*)", change, re.DOTALL)
        if found is not None and found[2].startswith("=") and not found[1].startswith(scrub.ALLOWED):
            return f"environment: {found[1]}=<value {self._tag(found[2])}>"
        return self._scrub.text(change)

    def manifest(self, capture: Capture, facts: Manifest) -> Manifest:
        """manifest.json with other tokens, and without names and paths."""
        outputs = [self._output(capture, output) for output in facts.outputs]
        return msgspec.structs.replace(self._scrubbed(facts, KEPT_MANIFEST), outputs=outputs)

    def _output(self, capture: Capture, output: Output) -> Output:
        def of(index: int, token: int) -> int:
            return self._generated(capture, output.request, index, token)

        return msgspec.structs.replace(
            output,
            internal="",
            tokens=[of(index, token) for index, token in enumerate(output.tokens)],
            logprobs=[
                [(of(index, token), value) for token, value in found]
                for index, found in enumerate(output.logprobs)
            ],
        )


def _key(captures: Sequence[Capture]) -> bytes:
    """The key: a digest of documents that are not in the archive as they are; always the same."""
    total = hashlib.sha256(b"localizer archive")
    for capture in captures:
        for name in (OPEN, JOURNAL, MANIFEST, LOG):
            path = capture.folder / name
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as handle:
                    total.update(name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return total.digest()
