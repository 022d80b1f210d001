// AdamW over a piece of the host's memory in one pass: each value is read once and written once.
//
// Compiled on the machine that runs it and called without Python's lock (train/host_adamw.py). In the order of the
// GPU's kernel (train/adamw.py); no product is fused with a sum (-ffp-contract=off), so that an element's bits do not
// depend on where in a vector it lies, which is how a layout cuts its weight.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widened(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
inline float widened(float value) { return value; }
inline double widened(double value) { return value; }

inline void narrow_to(bf16& place, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // ties to even
    place.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : nearest);
}
inline void narrow_to(float& place, float value) { place = value; }
inline void narrow_to(double& place, double value) { place = value; }

// Elements that a thread takes at a time: a core that is busy elsewhere takes fewer, and none waits for it.
constexpr int64_t CHUNK = 1 << 14;

// `narrow` may be `gradient`: an element is read before it is written.
//
// An update can also be made in two passes of the same arithmetic, and so to the same bits: one for the narrow copy,
// which leaves the states as they were (`Narrows` alone), and one that catches up with them (`Keeps` alone).
template <bool Keeps, bool Narrows, typename Wide, typename Gradient, typename Narrow>
void update(Wide* weight, Wide* mean, Wide* square, const Gradient* gradient, Narrow* narrow, int64_t length,
            const double* settings, int threads) {
    const Wide scale = settings[0], step_size = settings[1], root_correction = settings[2], rise1 = settings[3],
               beta2 = settings[4], rise2 = settings[5], eps = settings[6], decay = settings[7];
    const int64_t chunks = (length + CHUNK - 1) / CHUNK;
    const int team = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, chunks)));
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
    for (int64_t start = 0; start < length; start += CHUNK) {
        const int64_t end = std::min(length, start + CHUNK);
#pragma omp simd
        for (int64_t i = start; i < end; i++) {
            const Wide found = static_cast<Wide>(widened(gradient[i])) / scale;
            const Wide first = mean[i] + (found - mean[i]) * rise1;
            const Wide second = square[i] * beta2 + found * found * rise2;
            const Wide root = std::sqrt(second) / root_correction + eps;
            const Wide kept = weight[i] - weight[i] * decay;
            const Wide value = kept - step_size * (first / root);
            if constexpr (Keeps) {
                mean[i] = first;
                square[i] = second;
                weight[i] = value;
            }
            if constexpr (Narrows) narrow_to(narrow[i], value);
        }
    }
}

}  // namespace

#define PASS(name, keeps, narrows, Wide, Gradient, Narrow)                                                         \
    extern "C" void name(void* weight, void* mean, void* square, void* gradient, void* narrow, int64_t length,     \
                         const double* settings, int threads) {                                                    \
        update<keeps, narrows>(static_cast<Wide*>(weight), static_cast<Wide*>(mean), static_cast<Wide*>(square),   \
                               static_cast<const Gradient*>(gradient), static_cast<Narrow*>(narrow), length,       \
                               settings, threads);                                                                 \
    }
#define UPDATE(types, Wide, Gradient, Narrow)                              \
    PASS(adamw_whole_##types, true, true, Wide, Gradient, Narrow)          \
    PASS(adamw_narrow_##types, false, true, Wide, Gradient, Narrow)        \
    PASS(adamw_states_##types, true, false, Wide, Gradient, Narrow)

UPDATE(bfloat16_bfloat16, float, bf16, bf16)
UPDATE(float32_bfloat16, float, float, bf16)
UPDATE(float32_float32, float, float, float)
UPDATE(float64_float64, double, double, double)
