"""Mutation score: small faults written into a kernel's own source, and how many of them the checks reject.

The mutants        mutants; operators has the changes of Python and Triton, cuda_tokens those of CUDA C++
A run              run starts a team of workers; mutant_queue decides what each does next; kernel gives a worker a
                   mutant, and requests checks of the original where they decide
A worker           worker is a program of its own that forks a process for each task; checkout has its sources; verdict
                   turns the end of a process (process) and its messages (messages) into a result for the mutant
In such a process  cuda starts CUDA; checks makes the checks of SPEC, kernel_tests the tests, in the order of selection;
                   clock limits each; compilers watches Triton and NVRTC; launched_code has digests of their output;
                   overlay separates what a mutant compiles
The results        results, report; machine_code has those that can be determined without running anything
"""
