import os
import tempfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# Before the first import of airflow; the operators' tests may share the process.
os.environ.setdefault("EAGLE3_TEST_AIRFLOW_HOME", tempfile.mkdtemp(prefix="eagle3-airflow-"))
os.environ.update(
    {
        "AIRFLOW_HOME": os.environ["EAGLE3_TEST_AIRFLOW_HOME"],
        "AIRFLOW__CORE__DAGS_FOLDER": str(CHECKOUT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        "EAGLE3_RETRY_DELAY_S": "0",
    }
)


@pytest.fixture(scope="session")
def bag():
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(str(CHECKOUT / "dags"), bundle_name="dags-folder")
