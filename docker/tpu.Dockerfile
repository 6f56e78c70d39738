# Cloud TPU VMs.
#   docker build -f docker/tpu.Dockerfile -t trl_jax:tpu .
#   docker run --privileged --net=host -v "$PWD:/work" trl_jax:tpu env
FROM python:3.12-slim
COPY . /trl_jax
RUN pip install --no-cache-dir "/trl_jax[tpu]"
WORKDIR /work
ENTRYPOINT ["trl-jax"]
