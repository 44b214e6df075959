"""Mutation score: small faults written into a kernel's own source, and how many of them the checks reject.

The mutants        mutants; operators has the changes of Python and Triton, cuda_tokens those of CUDA C++
A run              run starts a team of workers; mutant_queue has what each does next; kernel gives a worker a mutant,
                   and asks for the original's checks where they decide
A worker           worker is a program of its own: it forks a process for each task; checkout has its sources,
                   verdict what it means for a mutant how its process (process) ended, and what that said (messages)
In such a process  cuda starts CUDA; checks makes the checks of SPEC, kernel_tests the tests, in the order of selection;
                   clock limits each; compilers watches Triton and NVRTC; launched_code has digests of what they make;
                   overlay keeps what a mutant compiles apart
The results        results, report; machine_code has those for which nothing needs to run
"""
