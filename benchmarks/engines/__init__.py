"""What the benchmarks over real engines share: adapters that sign their answers, and a router with them live."""
