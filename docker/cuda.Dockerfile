# SPDX-License-Identifier: Apache-2.0
# kvstratad on GPUs: the image `kvstrata` (cpu.Dockerfile) and the CUDA backend, which has CUDA's runtime in it. Of the
# machine it needs the driver alone, as nvidia-container-toolkit gives it to a container.
# Build: make image-cuda, or docker build -f docker/cuda.Dockerfile FOLDER, where FOLDER has libkvstrata_cuda.so.
ARG BASE=kvstrata
FROM ${BASE}
COPY libkvstrata_cuda.so /usr/lib/
ENV KVSTRATA_POOL_DEVICE=cuda NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
