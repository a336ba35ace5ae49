"""Every error keepgrad raises, one short tree, named by the boundary it crosses.

KeepgradError
    ConfigError          a configuration file, flag or environment cannot be used       exit 2
    ModelError           a model folder, tokenizer or download cannot be used           exit 2
    VersionError         a stored policy version is missing, corrupt or incompatible    exit 2
    LedgerError          the ledger refuses: half-written, out of space, out of order   exit 2
        ConflictError    the same id came twice with different content                  HTTP 409
    RequestError         a client sent something the gateway cannot use                 HTTP 4xx
    EngineError          the engine is not reachable or lost a request                  HTTP 503
    TrainError           training cannot go on: NaN, no samples, mismatched lengths     exit 2
    GateError            a gate cannot decide, e.g. too few contexts                    exit 2
    AuditError           the books do not balance                                       exit 1

A message is one sentence that says what, where and how to mend it. What a model or a user does is data, never one of these.
"""


class KeepgradError(Exception):
    """Base of the tree; `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(KeepgradError):
    """A configuration file, flag or environment cannot be used."""


class ModelError(KeepgradError):
    """A model folder, tokenizer or download cannot be used."""


class VersionError(KeepgradError):
    """A stored policy version is missing, corrupt or incompatible."""


class LedgerError(KeepgradError):
    """The ledger refuses a write or cannot read what it holds."""


class ConflictError(LedgerError):
    """The same id arrived twice with different content (HTTP 409)."""


class RequestError(KeepgradError):
    """A client sent something the gateway cannot use; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class EngineError(KeepgradError):
    """The engine is not reachable, or lost a request (retryable)."""


class TrainError(KeepgradError):
    """Training cannot go on; the parent version stays as it was."""


class GateError(KeepgradError):
    """A gate cannot decide; the incumbent keeps all traffic."""


class AuditError(KeepgradError):
    """The books do not balance."""

    exit_code = 1
