# NVIDIA GPUs. The jax wheels include CUDA; the host needs a driver and the NVIDIA container toolkit.
#   docker build -f docker/cuda.Dockerfile -t trl_jax:cuda .
#   docker run --gpus all -v "$PWD:/work" trl_jax:cuda env
FROM python:3.12-slim
COPY . /trl_jax
RUN pip install --no-cache-dir "/trl_jax[cuda]"
WORKDIR /work
ENTRYPOINT ["trl-jax"]
