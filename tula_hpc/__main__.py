from tula_hpc.cli import main

if __name__ == "__main__":
    main()
