"""The handle on a run that this process drives."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from typing import Any

from ensemble.controller.controller import Controller
from ensemble.events import RunFinished
from ensemble.interrupts import defer_signals, raise_interrupted
from ensemble.result import Result, make_result
from ensemble.run import Request, Run
from ensemble.store import RunState, format_command
from pipelines.environment.library_settings import apply_settings, find_settings, keep_settings
from pipelines.providers import import_object

log = logging.getLogger(__name__)

SIGNAL_S = 0.5  # within which a signal is acted on that did not end the wait for the run


class DrivenRun(Run):
    """A handle on a run that this process drives."""

    def __init__(self, controller: Controller, *, threaded: bool) -> None:
        super().__init__(controller.run_dir)
        self._controller: Controller | None = controller  # until the run is over: it holds the ensemble's arrays
        self._state, self._lock, self._view = controller.state, controller.lock, _make_view()
        self._error: BaseException | None = None
        self._threaded = threaded
        self._settings = find_settings()  # of the run: `wait` may be called in others
        # An event instead of `join`: a signal that interrupts `join` makes Python 3.11 regard the thread as ended.
        self._over = threading.Event()
        if threaded:
            name = f"ensemble {controller.ensemble.name}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
            atexit.register(self._stop_at_exit)
        else:
            controller.view = self._view

    @property
    def state(self) -> RunState:
        """The run's state, which changes while the run is in progress."""
        return self._state

    def wait(self) -> Result:
        """Wait for the end of the run, in a notebook with its progress; with the inline executor, train now.

        After Ctrl-C, SIGTERM or SIGHUP the members write a checkpoint and all processes end before this raises. A
        second signal ends them at once; a resume then continues from the last checkpoints.

        Raises:
            KeyboardInterrupt: the run was stopped by Ctrl-C.
            SystemExit: it was stopped by SIGTERM or SIGHUP.
            ClusterLostError: it was stopped because the cluster does not answer; a resume continues it.
        """
        at_once = False
        with self._view or contextlib.nullcontext(), defer_signals(self.stop) as received:
            try:
                self.run_to_end()
            except (KeyboardInterrupt, SystemExit):  # the second signal
                at_once = True
                Request(self._dir, "stop", at_once=True)
                self.run_to_end()
        if received and (self._error is None or isinstance(self._error, (KeyboardInterrupt, SystemExit))):
            ended = self.state.ended
            if self._error is None and ended is not None and isinstance(ended, RunFinished):
                raise_interrupted(received[0], f"{self.run_dir} has finished before it could be stopped")
            how = "ended at once" if at_once or self._error is not None else "stopped"
            raise_interrupted(received[0], f"{how}; {format_command('resume', self.run_dir)} continues the run")
        if self._error is not None:
            raise self._error
        members = list(self.state.members.values())
        if not any(member.has_result for member in members):
            error = next((member.error for member in members if member.error), "see its log")
            log.warning("%s: no member finished: %s", self.run_dir, error)
        return make_result(self._dir)

    def run_to_end(self) -> None:
        if not self._threaded and not self._over.is_set():
            self._run()
        # A signal that arrives while this thread hands over the interpreter lock ends no wait without a limit.
        while not self._over.wait(SIGNAL_S):
            self._show_progress()
        self._show_progress()

    def _show_progress(self) -> None:
        """Draw the state in a notebook, from the thread that waits: there the output belongs to its cell."""
        if self._view is not None and self._view.is_due:
            with self._lock:
                self._view.update(self.state)

    def _run(self) -> None:
        assert self._controller is not None
        try:
            with contextlib.nullcontext() if self._threaded else keep_settings():
                if not self._threaded:  # members train in this process
                    apply_settings(self._settings)
                self._controller.run()
        except BaseException as error:
            self._error = error
        finally:
            self._controller.release()
            self._controller = None
            atexit.unregister(self._stop_at_exit)
            self._over.set()

    def _members(self) -> list[str]:
        with self._lock:
            return list(self.state.members)

    def _stop_at_exit(self) -> None:
        """Stop the run when the interpreter ends before `wait` was called: members write a checkpoint."""
        if not self._over.is_set():
            text = "the program ends before its run; stopping the run, %s continues it"
            # An exception that a signal raises here would be printed with its traceback, and end the wait.
            at_once = defer_signals(lambda: Request(self._dir, "stop", at_once=True))
            with at_once, contextlib.suppress(KeyboardInterrupt, SystemExit):
                log.warning(text, format_command("resume", self.run_dir))
                self.stop()
                while not self._over.wait(SIGNAL_S):
                    pass


def _make_view() -> Any:
    """What shows the progress in a notebook (`ensemble.reporting.notebook.watch`); None where there is none."""
    return import_object("ensemble.reporting.notebook:watch")() if "IPython" in sys.modules else None
