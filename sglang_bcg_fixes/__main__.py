from sglang_bcg_fixes.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
