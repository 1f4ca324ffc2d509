"""A stand-in nvidia-smi answers as the real one did on an H200 (driver 580); the holders are real processes."""

import getpass
import subprocess
import sys

import pytest

from eagle3_core.engine import gpus
from eagle3_core.errors import EngineError, GpuBusyError

TWO = "0, GPU-aaaa-1, 4, 143771\n1, GPU-bbbb-2, 4, 143771\n"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put a nvidia-smi on the path that prints two files, and return how to write them."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in --query-gpu*) cat {tmp_path}/gpus ;; --query-compute-apps*) cat {tmp_path}/apps ;; '
        f"esac\nexit $(cat {tmp_path}/status)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answer(gpus=TWO, apps="", status=0):
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "apps").write_text(apps)
        (tmp_path / "status").write_text(str(status))

    answer()
    return answer


@pytest.fixture
def foreign():
    command = [sys.executable, "-c", "import time; time.sleep(600)", "vllm serve"]
    with subprocess.Popen(command) as process:
        yield process
        assert process.poll() is None, "a process of somebody else was ended"
        process.kill()


def test_a_foreign_process_is_named_with_pid_user_command_and_memory_and_left_alone(smi, foreign):
    smi(apps=f"GPU-bbbb-2, {foreign.pid}, 101234, python3\n")
    with pytest.raises(GpuBusyError) as caught:
        gpus.require_free(2, within_s=0)
    said = str(caught.value)
    assert f"GPU 1: pid {foreign.pid} of {getpass.getuser()} (" in said
    assert "vllm serve) holds 101,234 MiB" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    assert "\n" not in said


def test_only_the_gpus_the_server_takes_are_looked_at(smi, foreign, monkeypatch):
    smi(apps=f"GPU-bbbb-2, {foreign.pid}, 101234, python3\n")
    assert gpus.require_free(1, within_s=0)
    with pytest.raises(GpuBusyError, match="GPU 1"):
        gpus.require_free(1, first=1, within_s=0)
    for visible in ("1", "GPU-bbbb-2", "1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(GpuBusyError, match="GPU 1"):
            gpus.require_free(1, within_s=0)


def test_memory_nobody_visible_holds_is_somebodys_too(smi):
    smi(gpus="0, GPU-aaaa-1, 80123, 143771\n")
    with pytest.raises(GpuBusyError, match="80,123 of 143,771 MiB held by a process that cannot be seen"):
        gpus.require_free(1, within_s=0)
    smi(gpus="0, GPU-aaaa-1, 600, 143771\n")
    assert gpus.require_free(1, within_s=0)


def test_memory_that_is_just_being_given_back_is_waited_for(smi, monkeypatch):
    smi(gpus="0, GPU-aaaa-1, 80123, 143771\n")
    monkeypatch.setattr(gpus.time, "sleep", lambda _seconds: smi())
    assert gpus.require_free(1)


def test_an_amount_the_driver_does_not_tell_is_unknown_not_zero(smi, foreign):
    smi(apps=f"GPU-aaaa-1, {foreign.pid}, [N/A], [Not Found]\n")
    with pytest.raises(GpuBusyError, match="holds an unknown amount"):
        gpus.require_free(1, within_s=0)


def test_an_nvidia_smi_that_fails_is_an_error_and_one_that_is_not_there_is_told(smi, tmp_path, monkeypatch):
    smi(gpus="Unable to determine the device handle for GPU 0000:00:06.0: Unknown Error\n", status=15)
    with pytest.raises(EngineError, match="found exit 15: Unable to determine"):
        gpus.require_free(1, within_s=0)
    smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(EngineError, match="of 2 GPUs, found '7'"):
        gpus.require_free(1, within_s=0)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert not gpus.require_free(1, within_s=0)


def test_what_ended_processes_still_hold_is_told(smi):
    smi(apps="GPU-aaaa-1, 123, 4000, sglang::scheduler\n")
    assert "pid 123" in gpus.require_released([123, 124], 1, within_s=0)
    assert gpus.require_released([999], 1, within_s=0) == ""
