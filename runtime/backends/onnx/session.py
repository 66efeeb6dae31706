"""An ONNX Runtime session: opened for small memory, on a device, timed, can be ended."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TypeAlias

import onnxruntime as ort

from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.core.errors import BackendError, BundleError, NativeUnavailableError
from edgeinfer.runtime.backends.contract import PassCancelledError
from edgeinfer.runtime.devices.providers import CPU, CPU_MEMORY, Device, add_provider, device_error
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.system.forks import keep_for_good, renewed_in_children
from edgeinfer.runtime.system.memory import is_refusal, refused, require_room, stack_bytes

_TERMINATED = "terminate flag"
_SILENT = 4  # severity of messages that are logged


class _CopiedInputs:
    """A binding on a device with memory of its own, where onnxruntime copies an input over when it is bound. So inputs
    are bound again for each run; what lies on the device already is not copied."""

    def __init__(self, binding: ort.IOBinding) -> None:
        self._binding = binding
        self._inputs: dict[str, ort.OrtValue] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self._inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: ort.OrtValue) -> None:
        self._binding.bind_ortvalue_output(name, value)

    def renewed(self) -> ort.IOBinding:
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        return self._binding


Binding: TypeAlias = ort.IOBinding | _CopiedInputs


def _bound(binding: Binding) -> ort.IOBinding:
    return binding.renewed() if isinstance(binding, _CopiedInputs) else binding


def _register(options: ort.SessionOptions, kernel: NativeKernel) -> None:
    try:
        options.register_custom_ops_library(str(kernel.path))
    except Exception as error:
        # onnxruntime raises a family of exceptions without a common base of its own.
        reason = str(error).splitlines()[0]
        hint = 'Install the onnxruntime that edgeinfer asks for (pip install -U "onnxruntime>=1.31,<2").'
        raise NativeUnavailableError(f"onnxruntime refuses the native kernel: {reason}", hint) from error


class OrtSession:
    """A session set up for small memory, whose runs can be ended from another thread. The arena is off because it never
    returns the activations of the largest pass; memory patterns are off because they plan for fixed shapes. `folder`
    has the weights of a model that is no file, `affinity` is onnxruntime's of all threads but the first."""

    def __init__(
        self,
        path: str | bytes,
        threads: int,
        kernel: NativeKernel | None = None,
        *,
        device: Device = CPU,
        affinity: str = "",
        folder: Path | None = None,
    ) -> None:
        self._device = device
        # Where some of its threads start and others do not, onnxruntime waits for all of them without end.
        require_room("Starting a session's threads", stack_bytes(threads - 1))
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        # Its errors come as exceptions, which are translated; the log would print them a second time.
        options.log_severity_level = _SILENT
        # Threads may spin inside a pass, where the next operator follows within microseconds, but not between passes.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if affinity:
            options.add_session_config_entry("session.intra_op_thread_affinities", affinity)
        if folder is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        if kernel is not None:
            _register(options, kernel)
        providers = add_provider(device, options)
        try:
            # Without the fallback, which would print what failed and try the same again.
            self._session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
        except Exception as error:
            # onnxruntime raises a family of exceptions without a common base of its own.
            name = path if isinstance(path, str) else "A model"
            if is_refusal(error) and device.memory == CPU_MEMORY:
                raise refused(f"The session of {name}", error) from error
            if not device.on_cpu:
                raise device_error(device, error) from error
            reason = str(error).splitlines()[0]
            raise BundleError(f"{name} cannot be loaded: {reason}", "Export or download the bundle again.") from error
        if device.provider not in self._session.get_providers():
            # A provider that cannot be made is left out, with a line in the log.
            raise device_error(device, "onnxruntime could not make its provider")
        renewed_in_children(self)
        values = self._session.get_inputs(), self._session.get_outputs()
        # Inputs and outputs by name: onnxruntime's type, and the shape, in which a name stands for a size.
        self.declared = tuple({each.name: (each.type, tuple(each.shape)) for each in some} for some in values)
        self.inputs, self.outputs = (tuple(some) for some in self.declared)
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = _SILENT
        # What is meant anyway. Where it is not said, the Python side of 1.32 has an exception tell it so at every run,
        # which took 57 microseconds.
        self._run_options.add_run_config_entry("gpu_graph_id", "0")
        if threads > 1:
            # The threads of a new session spin for some 40 ms, on cores that loading wants, unless a run ends. One that
            # asks for no output ends at once, with an error.
            with contextlib.suppress(Exception):
                self._session.run_with_iobinding(self._session.io_binding(), self._run_options)

    def renew(self) -> None:
        """Keeps the session, whose end waits for its threads (in `pthread_cond_destroy`)."""
        keep_for_good(self._session)

    def binding(self) -> Binding:
        """A new, empty binding of inputs and outputs, which are read and written where they lie."""
        binding = self._session.io_binding()
        return binding if self._device.memory == CPU_MEMORY else _CopiedInputs(binding)

    def run(self, binding: Binding) -> None:
        self._run_options.terminate = False
        try:
            self._session.run_with_iobinding(_bound(binding), self._run_options)
        except Exception as error:
            # onnxruntime raises a family of exceptions without a common base of its own.
            if _TERMINATED in str(error):
                raise PassCancelledError("The pass was cancelled.") from error
            if is_refusal(error):
                raise refused("This pass", error) from error
            if not self._device.on_cpu:
                raise device_error(self._device, error) from error
            raise BackendError(f"onnxruntime failed: {str(error).splitlines()[0]}") from error

    def cancel(self) -> None:
        self._run_options.terminate = True


def capabilities_on(device: Device, whole: Capabilities) -> Capabilities:
    """A bundle's capabilities on a device. Rows that lie behind the length, from which a pass resumes, do not survive
    the change of copies."""
    traits = device.traits
    return dataclasses.replace(
        whole,
        tree=whole.tree and traits.tree_bias,
        layer_skip=whole.layer_skip and traits.in_place_kv,
        hidden=whole.hidden and traits.in_place_kv,
        exact=whole.exact and device.on_cpu,
    )
