#!/usr/bin/env bash
# Check and test: ./run_tests.sh [pytest arguments]
#
# Without arguments: the pre-commit hooks (ruff, import-linter, mypy), then all tests on two workers. With arguments:
# pytest with them.
set -euo pipefail
harts_root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$harts_root"
. scripts/environment.sh "dev"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
# ruff, ruff format, import-linter and mypy: the hooks of .pre-commit-config.yaml
pre-commit run --all-files
python -m pytest -n "${HARTS_TEST_WORKERS:-2}" --dist worksteal --durations 15
