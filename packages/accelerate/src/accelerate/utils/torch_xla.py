"""Installing torch_xla in a Colab notebook."""

import subprocess
import sys


def install_xla(upgrade: bool = False) -> None:
    """Install the `torch_xla` that belongs to the installed torch; for notebooks on Google Colab.

    Args:
        upgrade (`bool`): Bring pip itself up to date first.

    Raises:
        RuntimeError: Anywhere but on Colab.
    """
    if "google.colab" not in sys.modules:
        raise RuntimeError("install_xla() is for Google Colab. Elsewhere run: pip install torch_xla[tpu]")
    from accel_state.libraries import installed_version

    pip = [sys.executable, "-m", "pip", "install"]
    if upgrade:
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
    version = (installed_version("torch") or "").partition("+")[0]
    subprocess.run([*pip, f"torch_xla[tpu]=={version}"], check=True)
