// The kernels of the memory test, for the device. What each of them must do is written in host.rs; the tests hold the two
// against each other. The driver gets tare.ptx, which build.py makes from this file.
//
// A block works on tiles: UNROLL vectors of 16 bytes for each of its threads, in an order in which neighbouring threads
// touch neighbouring vectors. All vectors of a tile are loaded before the first is looked at, so that enough requests are
// under way to keep the memory busy. Which pattern is wanted is decided once for a tile, not for each word.
//
// Loads go past the L1 cache: what is tested is the memory, and the L2 cache in front of it.

typedef unsigned long long u64;
typedef unsigned int u32;

enum { UNROLL = 4 };

#define RECORDS 256ull
#define HISTOGRAM_LIMIT (1ull << 20)
#define RESULT_SET 4ull
#define RESULT_CLEARED (RESULT_SET + 64ull)
#define RESULT_RECORDS (RESULT_CLEARED + 64ull)

// ---- patterns -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

__device__ __forceinline__ u32 rotate_left(u32 value, u32 by) {
    return value << (by & 31u) | value >> (32u - by & 31u);
}

template <int PATTERN>
__device__ __forceinline__ u64 value_of(u64 address, u64 index, u64 p0, u64 p1) {
    if (PATTERN == 0) {
        return address + p1 ^ p0;
    }
    if (PATTERN == 1) {
        return p0;
    }
    if (PATTERN == 2) {
        return p0 ^ 0ull - (index & 1ull);
    }
    if (PATTERN == 3) {
        return 1ull << (index + p1 & 63ull) ^ p0;
    }
    if (PATTERN == 4) {
        u32 by = (u32)(index + p1) & 7u;
        u32 byte = (u32)p0 & 0xFFu;
        byte = (byte << by | byte >> (8u - by)) & 0xFFu;
        return byte * 0x0101010101010101ull;
    }
    if (PATTERN == 5) {
        u32 shift = (u32)(index * 2ull + p1) & 31u;
        return (u64)rotate_left((u32)p0, shift) | (u64)rotate_left((u32)p0, shift + 1u) << 32;
    }
    if (PATTERN == 6) {
        return mix(p0 + (index + 1ull) * 0x9E3779B97F4A7C15ull) ^ p1;
    }
    if (PATTERN == 7) {
        return (0xC0DEull << 48 | (p0 & 0xFFFFFFFFull) << 16 | (index & 0xFFFFull)) ^ p1;
    }
    return 0;
}

// A pattern with what it needs to give every word its value.
struct Pattern {
    u64 number, p0, p1;
};

__device__ __forceinline__ u64 value(const Pattern &pattern, u64 address, u64 index) {
    switch (pattern.number) {
    case 0: return value_of<0>(address, index, pattern.p0, pattern.p1);
    case 1: return value_of<1>(address, index, pattern.p0, pattern.p1);
    case 2: return value_of<2>(address, index, pattern.p0, pattern.p1);
    case 3: return value_of<3>(address, index, pattern.p0, pattern.p1);
    case 4: return value_of<4>(address, index, pattern.p0, pattern.p1);
    case 5: return value_of<5>(address, index, pattern.p0, pattern.p1);
    case 6: return value_of<6>(address, index, pattern.p0, pattern.p1);
    case 7: return value_of<7>(address, index, pattern.p0, pattern.p1);
    default: return 0;
    }
}

template <int PATTERN>
__device__ __forceinline__ void values_of(u64 address, u64 index, u64 p0, u64 p1, u64 step, u64 (&out)[2 * UNROLL]) {
#pragma unroll
    for (int j = 0; j < UNROLL; j++) {
        u64 word = (u64)j * step;
        out[2 * j] = value_of<PATTERN>(address + 8ull * word, index + word, p0, p1);
        out[2 * j + 1] = value_of<PATTERN>(address + 8ull * word + 8ull, index + word + 1ull, p0, p1);
    }
}

// The values of UNROLL vectors, the first of which begins at `address` with `index`, and which lie `step` words apart.
__device__ __forceinline__ void values(const Pattern &pattern, u64 address, u64 index, u64 step, u64 (&out)[2 * UNROLL]) {
    switch (pattern.number) {
    case 0: values_of<0>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 1: values_of<1>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 2: values_of<2>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 3: values_of<3>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 4: values_of<4>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 5: values_of<5>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 6: values_of<6>(address, index, pattern.p0, pattern.p1, step, out); break;
    case 7: values_of<7>(address, index, pattern.p0, pattern.p1, step, out); break;
    default:
#pragma unroll
        for (int j = 0; j < 2 * UNROLL; j++) {
            out[j] = 0;
        }
    }
}

// ---- results --------------------------------------------------------------------------------------------------------

// Rare, and kept out of the loops.
__device__ __noinline__ void note_mismatch(u64 *result, u64 address, u64 expected, u64 got) {
    u64 number = atomicAdd(result, 1ull);
    atomicMax(result + 1, address);
    atomicMax(result + 2, ~address);
    if (number < HISTOGRAM_LIMIT) {
        u64 wrong = expected ^ got;
#pragma unroll 1
        for (u64 bit = 0; bit < 64; bit++) {
            if (wrong >> bit & 1) {
                atomicAdd(result + (got >> bit & 1 ? RESULT_SET : RESULT_CLEARED) + bit, 1ull);
            }
        }
    }
    if (number < RECORDS) {
        u64 *record = result + RESULT_RECORDS + 3ull * number;
        record[0] = address;
        record[1] = expected;
        record[2] = got;
    }
}

__device__ __forceinline__ void compare(u64 *result, u64 address, u64 expected, u64 got) {
    if (expected != got) {
        note_mismatch(result, address, expected, got);
    }
}

// ---- the range ------------------------------------------------------------------------------------------------------

// A range of words cut into vectors of two, with a single word before and after where they do not fit.
struct Range {
    u64 base;      // of the vectors: a multiple of 16
    u64 vectors;
    u64 first;     // words before the vectors: 0 or 1
    u64 last;      // words after them: 0 or 1
    u64 origin;    // index of the first vector's first word
};

__device__ __forceinline__ Range cut(u64 base, u64 words, u64 origin) {
    Range range;
    range.first = words != 0 && (base & 15ull) != 0;
    range.base = base + 8ull * range.first;
    range.origin = origin + range.first;
    range.vectors = (words - range.first) / 2;
    range.last = (words - range.first) & 1ull;
    return range;
}

__device__ __forceinline__ ulonglong2 load(u64 address) {
    return __ldcg((const ulonglong2 *)address);
}

__device__ __forceinline__ u64 load_word(u64 address) {
    return __ldcg((const u64 *)address);
}

__device__ __forceinline__ void store(u64 address, u64 low, u64 high) {
    ulonglong2 pair;
    pair.x = low;
    pair.y = high;
    *(ulonglong2 *)address = pair;
}

__device__ __forceinline__ void store_word(u64 address, u64 word) {
    *(u64 *)address = word;
}

// Calls, for every tile of this block: `body.tile(address, index, step)` where the tile is whole, else `body.vector(address,
// index)` for each vector of this thread; and `body.word(address, index)` for the single words. Addresses and indices are
// those of the thread's first word.
template <typename Body>
__device__ __forceinline__ void for_each(const Range &range, bool descending, Body &body) {
    const u64 threads = blockDim.x, tile = threads * UNROLL;
    const u64 tiles = (range.vectors + tile - 1) / tile;
    const bool single = blockIdx.x == 0 && threadIdx.x == 0;
    if (single && range.first && !descending) {
        body.word(range.base - 8ull, range.origin - 1ull);
    }
    if (single && range.last && descending) {
        body.word(range.base + 16ull * range.vectors, range.origin + 2ull * range.vectors);
    }
    for (u64 step = blockIdx.x; step < tiles; step += gridDim.x) {
        const u64 number = descending ? tiles - 1 - step : step;
        const u64 vector = number * tile + threadIdx.x;
        const u64 address = range.base + 16ull * vector, index = range.origin + 2ull * vector;
        if ((number + 1) * tile <= range.vectors) {
            body.tile(address, index, 2ull * threads);
        } else {
#pragma unroll 1
            for (int j = 0; j < UNROLL; j++) {
                const u64 at = descending ? UNROLL - 1 - j : j;
                if (vector + at * threads < range.vectors) {
                    body.vector(address + 16ull * at * threads, index + 2ull * at * threads);
                }
            }
        }
    }
    if (single && range.last && !descending) {
        body.word(range.base + 16ull * range.vectors, range.origin + 2ull * range.vectors);
    }
    if (single && range.first && descending) {
        body.word(range.base - 8ull, range.origin - 1ull);
    }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

struct Filler {
    Pattern pattern;
    __device__ __forceinline__ void tile(u64 address, u64 index, u64 step) {
        u64 words[2 * UNROLL];
        values(pattern, address, index, step, words);
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            store(address + 8ull * step * j, words[2 * j], words[2 * j + 1]);
        }
    }
    __device__ __forceinline__ void vector(u64 address, u64 index) {
        store(address, value(pattern, address, index), value(pattern, address + 8ull, index + 1ull));
    }
    __device__ __forceinline__ void word(u64 address, u64 index) {
        store_word(address, value(pattern, address, index));
    }
};

struct Verifier {
    Pattern pattern;
    u64 *result;
    __device__ __forceinline__ void tile(u64 address, u64 index, u64 step) {
        ulonglong2 got[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            got[j] = load(address + 8ull * step * j);
        }
        u64 words[2 * UNROLL];
        values(pattern, address, index, step, words);
        u64 wrong = 0;
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            wrong |= (got[j].x ^ words[2 * j]) | (got[j].y ^ words[2 * j + 1]);
        }
        if (wrong) {
#pragma unroll
            for (int j = 0; j < UNROLL; j++) {
                compare(result, address + 8ull * step * j, words[2 * j], got[j].x);
                compare(result, address + 8ull * step * j + 8ull, words[2 * j + 1], got[j].y);
            }
        }
    }
    __device__ __forceinline__ void vector(u64 address, u64 index) {
        ulonglong2 got = load(address);
        compare(result, address, value(pattern, address, index), got.x);
        compare(result, address + 8ull, value(pattern, address + 8ull, index + 1ull), got.y);
    }
    __device__ __forceinline__ void word(u64 address, u64 index) {
        compare(result, address, value(pattern, address, index), load_word(address));
    }
};

// Verifies and then writes: both see the same vectors, one after the other.
struct VerifierWriter {
    Verifier verifier;
    Filler filler;
    __device__ __forceinline__ void tile(u64 address, u64 index, u64 step) {
        verifier.tile(address, index, step);
        filler.tile(address, index, step);
    }
    __device__ __forceinline__ void vector(u64 address, u64 index) {
        verifier.vector(address, index);
        filler.vector(address, index);
    }
    __device__ __forceinline__ void word(u64 address, u64 index) {
        verifier.word(address, index);
        filler.word(address, index);
    }
};

struct Reader {
    u64 sum;
    __device__ __forceinline__ void tile(u64 address, u64, u64 step) {
        ulonglong2 got[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            got[j] = load(address + 8ull * step * j);
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            sum += got[j].x ^ got[j].y;
        }
    }
    __device__ __forceinline__ void vector(u64 address, u64) {
        ulonglong2 got = load(address);
        sum += got.x ^ got.y;
    }
    __device__ __forceinline__ void word(u64 address, u64) {
        sum += load_word(address);
    }
};

struct Copier {
    u64 shift;  // from the target's address to the source's
    __device__ __forceinline__ void tile(u64 address, u64, u64 step) {
        ulonglong2 got[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            got[j] = load(address + 8ull * step * j + shift);
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            store(address + 8ull * step * j, got[j].x, got[j].y);
        }
    }
    __device__ __forceinline__ void vector(u64 address, u64) {
        ulonglong2 got = load(address + shift);
        store(address, got.x, got.y);
    }
    __device__ __forceinline__ void word(u64 address, u64) {
        store_word(address, load_word(address + shift));
    }
};

// A division of 64 bits takes longer than a vector takes to come: the residue of the next vector follows from the last
// one's, which always lies the same number of words back.
struct Residue {
    u64 modulus, index, at, step, step_residue;
    // The sum of two residues.
    __device__ __forceinline__ u64 plus(u64 a, u64 b) {
        const u64 room = modulus - b;
        return a >= room ? a - room : a + b;
    }
    __device__ __forceinline__ u64 of(u64 wanted) {
        if (wanted - index == step) {
            at = plus(at, step_residue);
        } else if (wanted != index) {
            step = wanted - index;
            step_residue = step % modulus;
            at = wanted % modulus;
        }
        index = wanted;
        return at;
    }
    __device__ __forceinline__ u64 after(u64 residue) {
        return residue + 1ull == modulus ? 0 : residue + 1ull;
    }
};

struct ModuloFiller {
    Residue residues;
    u64 residue, word_value;
    bool inside;
    __device__ __forceinline__ void pair(u64 address, u64 residue_low) {
        const bool low = residue_low == residue, high = residues.after(residue_low) == residue;
        if (low == inside && high == inside) {
            store(address, word_value, word_value);
        } else if (low == inside) {
            store_word(address, word_value);
        } else if (high == inside) {
            store_word(address + 8ull, word_value);
        }
    }
    // The residues of a tile's vectors follow from its first: `step` words apart.
    __device__ __forceinline__ void tile(u64 address, u64 index, u64 step) {
        u64 at = residues.of(index);
        const u64 by = step < residues.modulus ? step : step % residues.modulus;
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            pair(address + 8ull * step * j, at);
            at = residues.plus(at, by);
        }
    }
    __device__ __forceinline__ void vector(u64 address, u64 index) {
        pair(address, residues.of(index));
    }
    __device__ __forceinline__ void word(u64 address, u64 index) {
        if ((index % residues.modulus == residue) == inside) {
            store_word(address, word_value);
        }
    }
};

struct ModuloVerifier {
    Residue residues;
    u64 residue, word_value;
    u64 *result;
    __device__ __forceinline__ void pair(u64 address, u64 residue_low, const ulonglong2 &got) {
        if (residue_low == residue) {
            compare(result, address, word_value, got.x);
        }
        if (residues.after(residue_low) == residue) {
            compare(result, address + 8ull, word_value, got.y);
        }
    }
    __device__ __forceinline__ void tile(u64 address, u64 index, u64 step) {
        ulonglong2 got[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            got[j] = load(address + 8ull * step * j);
        }
        u64 at = residues.of(index);
        const u64 by = step < residues.modulus ? step : step % residues.modulus;
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            pair(address + 8ull * step * j, at, got[j]);
            at = residues.plus(at, by);
        }
    }
    __device__ __forceinline__ void vector(u64 address, u64 index) {
        pair(address, residues.of(index), load(address));
    }
    __device__ __forceinline__ void word(u64 address, u64 index) {
        if (index % residues.modulus == residue) {
            compare(result, address, word_value, load_word(address));
        }
    }
};

__device__ __forceinline__ Residue residue_from(u64 modulus) {
    Residue residues;
    residues.modulus = modulus == 0 ? 1 : modulus;
    residues.index = 0;
    residues.at = 0;
    residues.step = 0;
    residues.step_residue = 0;
    return residues;
}

extern "C" __global__ void __launch_bounds__(1024) tare_fill(u64 base, u64 words, u64 origin, u64 pattern, u64 p0, u64 p1) {
    Filler body = {{pattern, p0, p1}};
    for_each(cut(base, words, origin), false, body);
}

extern "C" __global__ void __launch_bounds__(1024) tare_verify(u64 base, u64 words, u64 origin, u64 pattern, u64 p0, u64 p1, u64 result) {
    Verifier body = {{pattern, p0, p1}, (u64 *)result};
    for_each(cut(base, words, origin), false, body);
}

extern "C" __global__ void __launch_bounds__(1024) tare_verify_write(u64 base, u64 words, u64 origin, u64 pattern, u64 p0, u64 p1, u64 result, u64 next,
                                             u64 q0, u64 q1, u64 descending) {
    VerifierWriter body = {{{pattern, p0, p1}, (u64 *)result}, {{next, q0, q1}}};
    for_each(cut(base, words, origin), descending != 0, body);
}

extern "C" __global__ void __launch_bounds__(1024) tare_copy(u64 to, u64 from, u64 words) {
    if (((to ^ from) & 15ull) == 0) {
        Copier body = {from - to};
        for_each(cut(to, words, 0), false, body);
        return;
    }
    // The two are not aligned alike: word by word.
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < words; at += (u64)gridDim.x * blockDim.x) {
        store_word(to + 8ull * at, load_word(from + 8ull * at));
    }
}

extern "C" __global__ void __launch_bounds__(1024) tare_read(u64 base, u64 words, u64 sink) {
    Reader body = {0};
    for_each(cut(base, words, 0), false, body);
    // Without a use of the sum the compiler would leave the reads out.
    if (body.sum == 0x9E3779B97F4A7C15ull) {
        store_word(sink, body.sum);
    }
}

extern "C" __global__ void __launch_bounds__(1024) tare_modulo_fill(u64 base, u64 words, u64 origin, u64 modulus, u64 residue, u64 value, u64 inside) {
    ModuloFiller body = {residue_from(modulus), residue, value, inside != 0};
    for_each(cut(base, words, origin), false, body);
}

extern "C" __global__ void __launch_bounds__(1024) tare_modulo_verify(u64 base, u64 words, u64 origin, u64 modulus, u64 residue, u64 value, u64 result) {
    ModuloVerifier body = {residue_from(modulus), residue, value, (u64 *)result};
    for_each(cut(base, words, origin), false, body);
}
