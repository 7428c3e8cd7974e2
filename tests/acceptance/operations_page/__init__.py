"""The operations page in the real UI of a live Airflow with the data of `make demo-ui`, in a headless browser."""
