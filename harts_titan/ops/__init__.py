"""Operations on plain tensors: one folder per op, the backend chosen by device and availability."""
