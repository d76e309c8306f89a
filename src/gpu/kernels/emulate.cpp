// Runs a kernel of tare.cu on the processor, for the tests: each thread of the grid in turn. Reads a launch and an image of
// memory from stdin, in 64-bit words, and writes the image as it is afterwards:
//
//     name length, name (padded to whole words), grid, block, number of arguments, arguments, address, words, the image

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(threads)

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct Dimension {
    unsigned int x;
};
static Dimension threadIdx, blockIdx, blockDim, gridDim;

// A vector access on an address that is not a multiple of its size is an error on a card.
template <typename T>
static void require_alignment(const T *pointer) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % alignof(T) != 0) {
        std::fprintf(stderr, "misaligned access\n");
        std::abort();
    }
}
template <typename T>
static T __ldcg(const T *pointer) {
    require_alignment(pointer);
    return *pointer;
}
static unsigned long long atomicAdd(unsigned long long *pointer, unsigned long long value) {
    unsigned long long old = *pointer;
    *pointer += value;
    return old;
}
static unsigned long long atomicMax(unsigned long long *pointer, unsigned long long value) {
    unsigned long long old = *pointer;
    *pointer = old > value ? old : value;
    return old;
}

#include "tare.cu"

static u64 word() {
    u64 value;
    if (std::fread(&value, 8, 1, stdin) != 1) {
        std::fprintf(stderr, "the input is too short\n");
        std::exit(2);
    }
    return value;
}

int main() {
    std::string name;
    const u64 length = word();
    for (u64 at = 0; at < (length + 7) / 8; at++) {
        u64 part = word();
        name.append(reinterpret_cast<char *>(&part), 8);
    }
    name.resize(length);
    gridDim.x = (unsigned)word();
    blockDim.x = (unsigned)word();
    std::vector<u64> a(word());
    for (u64 &argument : a) {
        argument = word();
    }
    a.resize(11);
    const u64 address = word(), words = word();
    void *image = mmap(reinterpret_cast<void *>(address), words * 8, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (image != reinterpret_cast<void *>(address)) {
        std::fprintf(stderr, "no memory at that address\n");
        return 3;
    }
    if (std::fread(image, 8, words, stdin) != words) {
        std::fprintf(stderr, "the image is too short\n");
        return 2;
    }
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
            if (name == "tare_fill") {
                tare_fill(a[0], a[1], a[2], a[3], a[4], a[5]);
            } else if (name == "tare_verify") {
                tare_verify(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
            } else if (name == "tare_verify_write") {
                tare_verify_write(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
            } else if (name == "tare_copy") {
                tare_copy(a[0], a[1], a[2]);
            } else if (name == "tare_read") {
                tare_read(a[0], a[1], a[2]);
            } else if (name == "tare_modulo_fill") {
                tare_modulo_fill(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
            } else if (name == "tare_modulo_verify") {
                tare_modulo_verify(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
            } else {
                std::fprintf(stderr, "there is no kernel %s\n", name.c_str());
                return 4;
            }
        }
    }
    return std::fwrite(image, 8, words, stdout) == words ? 0 : 2;
}
