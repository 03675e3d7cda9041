from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

CUDA = [
    "mxnet-cu112==1.9.1",
    "nvidia-cublas-cu11==11.11.3.6",
    "nvidia-cuda-nvrtc-cu11==11.8.89",
    "nvidia-cuda-runtime-cu11==11.8.89",
    "nvidia-cudnn-cu11>=8.9.6.50,<9",
    "nvidia-cufft-cu11==10.9.0.58",
    "nvidia-curand-cu11==10.3.0.86",
    "nvidia-cusolver-cu11==11.4.1.48",
    "nvidia-nccl-cu11==2.21.5",
    "nvidia-nvtx-cu11==11.8.86",
]

setup(
    name="memonger",
    version="1.0.0.dev0",
    description="Train MXNet 1.9 networks in a fraction of the memory, with the same result",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["memonger", "memonger.*"]),
    entry_points={"console_scripts": ["memonger=memonger.__main__:run"]},
    python_requires=">=3.8,<3.13",
    install_requires=[
        # What MXNet 1.9.1 can be imported with (memonger supplies np.bool to 1.26).
        "numpy==1.23.5; python_version<'3.12'",
        "numpy==1.26.4; python_version>='3.12'",
        "numba>=0.57",
        "tqdm>=4.60",
        "setuptools; python_version>='3.12'",  # brings distutils back, which MXNet needs
    ],
    extras_require={
        "cpu": ["mxnet==1.9.1"],
        "cu112": CUDA,
        "plot": ["matplotlib"],
        "examples": ["scikit-learn", "matplotlib"],
        "test": ["pytest>=7", "pytest-xdist>=3.2", "hypothesis>=6", "scikit-learn", "matplotlib"],
        "lint": ["ruff==0.17.5", "mypy==1.14.1"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
