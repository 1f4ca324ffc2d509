# The image of every stage: torch, transformers, SGLang and the whole core; no Airflow.
#   docker build -f docker/engine.Dockerfile -t eagle3-engine .                             for a machine without a GPU
#   docker build -f docker/engine.Dockerfile -t eagle3-engine --build-arg ENGINE=gpu .      for one with a GPU
FROM python:3.11-slim-bookworm
ARG ENGINE=cpu
WORKDIR /opt/eagle3
COPY . .
RUN EAGLE3_ENGINE=$ENGINE docker/install.sh engine && rm -rf /root/.cache
# A container's own bytecode would be lost with it. Some packages ship templates that do not compile.
RUN .venvs/engine/bin/python -m compileall -q -j 0 .venvs/engine/lib >/dev/null 2>&1 || true
ENV PATH=/opt/eagle3/.venvs/engine/bin:$PATH
# The wall between the two images: a stage that leaned on the scheduler could not run without one.
RUN if python -c 'import airflow' 2>/dev/null; then echo 'airflow is importable in the engine image' >&2; exit 1; fi
ENTRYPOINT ["python", "-m", "eagle3_core"]
