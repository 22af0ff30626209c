from sglang_bcg_fixes.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
