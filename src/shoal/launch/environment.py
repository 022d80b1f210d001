"""The environment variables that a rank's process gets: an allow-list.

The user who starts a run may have many credentials in the environment. A rank runs other people's code (a model's, a
library's, a compiler's) and needs almost none of them, so only listed variables pass. The launcher keeps the rest; each
rank's log names what was left out, so that a missing variable is easy to explain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from shoal.facts.config import Config
from shoal.facts.redact import is_secret_name

# Names of variables that were left out, for the processes started with the rest.
LEFT_OUT = "SHOAL_LEFT_OUT"

PASSED_ON = (
    # The system, the interpreter and its libraries.
    *("PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TMP", "TEMP"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "MALLOC_*", "XDG_*"),
    *("PYTHON*", "PYENV_*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "COVERAGE_*"),
    # Threads and linear algebra; the compiler that torch.compile calls.
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "NVPL_*", "CC", "CXX"),
    # Devices and networks.
    *("CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_*", "HIP_*", "ROCR_*", "HSA_*", "NCCL_*", "RCCL_*", "GLOO_*"),
    *("UCX_*", "FI_*", "OFI_*", "SHARP_*", "MLX5_*", "NVSHMEM_*", "SMDATAPARALLEL_*"),
    # What schedulers say about a job: NCCL's plugins and a rank's own code may read it.
    *("SLURM_*", "OMPI_*", "PMI_*", "PMIX_*", "MPI_LOCAL*"),
    # torch, and what torchrun's agent passes to a worker.
    *("TORCH*", "PYTORCH_*", "TRITON_*", "KINETO_*", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    # Hugging Face's directories and switches, and our own.
    *("HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "SAFETENSORS_*", "SHOAL_*"),
)  # fmt: skip

# Credentials and settings of object stores by URL scheme, for ranks that write checkpoints there.
STORES: Mapping[str, Sequence[str]] = {
    "s3": ("AWS_*", "S3_*", "BOTO_*"),
    "gs": ("GOOGLE_*", "GCS_*", "GCLOUD_*", "CLOUDSDK_*", "STORAGE_EMULATOR_HOST"),
    "az": ("AZURE_*", "ADLFS_*"),
    "hf": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "oci": ("OCI_*",),
    "oss": ("OSS_*",),
    "sftp": ("SSH_AUTH_SOCK",),
}
OTHER_NAMES = {
    "s3a": "s3",
    "gcs": "gs",
    "abfs": "az",
    "abfss": "az",
    "adl": "az",
    "wasb": "az",
    "ssh": "sftp",
}
# For any store: fsspec's own settings, and proxies.
ANY_STORE = (
    *("FSSPEC_*", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"),
)  # fmt: skip
ON_DISK = ("file", "local", "memory")


def passes(name: str, config: Config | None = None) -> bool:
    """Whether a rank of this job gets a variable. Variables named like secrets pass only on request."""
    # Requested by the user, or needed for what the user requested.
    asked = () if config is None else (*config.run.environment, *_of_store(config.checkpoint.to))
    if any(fnmatchcase(name, pattern) for pattern in asked):
        return True
    return not is_secret_name(name) and any(fnmatchcase(name, pattern) for pattern in PASSED_ON)


def _of_store(url: str | None) -> Sequence[str]:
    scheme = (url or "").partition("://")[0].lower()
    if url is None or scheme in ON_DISK:
        return ()
    # For an unknown store, any of these may be the credentials.
    known = STORES.get(OTHER_NAMES.get(scheme, scheme), [name for names in STORES.values() for name in names])
    return (*known, *ANY_STORE)


def keep_only_passed(
    config: Config | None = None, environment: MutableMapping[str, str] = os.environ
) -> list[str]:
    """Remove the variables that do not pass. Returns the names of all that were left out, here or by the parent
    process.
    """
    before = environment.get(LEFT_OUT, "").split()
    doomed = [name for name in environment if not passes(name, config)]
    for name in doomed:
        del environment[name]
    left_out = sorted({*before, *doomed} - environment.keys())
    environment[LEFT_OUT] = " ".join(left_out)
    return left_out


@contextmanager
def passed_on(config: Config | None = None) -> Iterator[None]:
    """Inside the context the environment has only what passes; afterwards this process has all of it again.

    For starting multiprocessing's fork server, which always inherits the current environment.
    """
    whole = dict(os.environ)
    keep_only_passed(config)
    try:
        yield
    finally:
        del os.environ[LEFT_OUT]
        # Only what is missing: other threads may read the environment meanwhile.
        os.environ.update({name: value for name, value in whole.items() if name not in os.environ})
