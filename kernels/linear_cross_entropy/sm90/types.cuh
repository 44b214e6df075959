// A copy of parts/sm90/types.cuh, made by `nox -s vendor`: change it there.
// Types and qualifiers of the parts for Hopper.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
