# The scheduler's image: Airflow, the operators and the light half of the core; no ML library.
#   docker build -f docker/airflow.Dockerfile -t eagle3-airflow .
FROM python:3.11-slim-bookworm
WORKDIR /opt/eagle3
COPY . .
RUN docker/install.sh airflow && rm -rf /root/.cache
ENV PATH=/opt/eagle3/.venvs/airflow/bin:$PATH
# The wall between the two images: the scheduler must parse DAGs without an ML library to lean on.
RUN if python -c 'import torch' 2>/dev/null; then echo 'torch is importable in the Airflow image' >&2; exit 1; fi
ENV AIRFLOW__CORE__DAGS_FOLDER=/opt/eagle3/dags AIRFLOW__CORE__LOAD_EXAMPLES=False AIRFLOW_HOME=/var/lib/airflow
CMD ["airflow", "standalone"]
