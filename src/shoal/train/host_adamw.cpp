// AdamW over a piece of the host's memory in one pass: each value is read once and written once.
//
// Compiled on the machine that runs it and called without Python's lock (train/host_adamw.py). In the order of the
// GPU's kernel (train/adamw.py); no product is fused with a sum (-ffp-contract=off), so that an element's bits do not
// depend on where in a vector it lies, which is how a layout cuts its weight.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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

// A core divides eight floats in five cycles: that, and not memory, was what an update waited for. By a number that all
// elements share it is quicker to the same bits: by the rounded inverse and the exact remainder (Markstein).
template <bool Quick, typename Wide>
inline Wide divided(Wide value, Wide by, Wide inverse) {
    if constexpr (!Quick) return value / by;
    const Wide near = value * inverse;
    const Wide exact = std::fma(std::fma(-near, by, value), inverse, near);
    return std::fabs(value) <= std::numeric_limits<Wide>::max() ? exact : near;
}

// Whether that is proved for a divisor: not where its bits are all ones. Doubles, the reference, are divided plainly.
template <typename Wide>
bool divides_quickly(Wide by) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    if constexpr (sizeof(Wide) == 4) {
        uint32_t bits;
        std::memcpy(&bits, &by, sizeof bits);
        return by > 0x1p-20f && by < 0x1p20f && (bits & 0x7fffffu) != 0x7fffffu;
    }
#endif
    return false;
}

// Of smaller values remainders are not exact.
constexpr double TINY = 0x1p-70;

template <typename Gradient>
bool has_tiny(const Gradient* gradient, int64_t start, int64_t end) {
    int found = 0;
    for (int64_t i = start; i < end; i++) {
        const auto size = std::fabs(widened(gradient[i]));
        found |= (size > 0) & (size < TINY);
    }
    return found;
}

// Elements that a thread takes at a time: a core that is busy elsewhere takes fewer, and none waits for it.
constexpr int64_t CHUNK = 1 << 14;

template <typename Wide>
struct Settings {
    Wide scale, step_size, root_correction, rise1, beta2, rise2, eps, decay;
};

// `narrow` may be `gradient`: an element is read before it is written.
//
// An update can also be made in two passes of the same arithmetic, and so to the same bits: one for the narrow copy,
// which leaves the states as they were (`Narrows` alone), and one that catches up with them (`Keeps` alone).
template <bool Quick, bool Keeps, bool Narrows, typename Wide, typename Gradient, typename Narrow>
void update_chunk(Wide* weight, Wide* mean, Wide* square, const Gradient* gradient, Narrow* narrow, int64_t start,
                  int64_t end, const Settings<Wide> with) {
    const Wide unscale = 1 / with.scale, correction = 1 / with.root_correction;
#pragma omp simd
    for (int64_t i = start; i < end; i++) {
        const Wide found = divided<Quick>(static_cast<Wide>(widened(gradient[i])), with.scale, unscale);
        const Wide first = mean[i] + (found - mean[i]) * with.rise1;
        const Wide second = square[i] * with.beta2 + found * found * with.rise2;
        const Wide root = divided<Quick>(std::sqrt(second), with.root_correction, correction) + with.eps;
        const Wide kept = weight[i] - weight[i] * with.decay;
        const Wide value = kept - with.step_size * (first / root);
        if constexpr (Keeps) {
            mean[i] = first;
            square[i] = second;
            weight[i] = value;
        }
        if constexpr (Narrows) narrow_to(narrow[i], value);
    }
}

template <bool Keeps, bool Narrows, typename Wide, typename Gradient, typename Narrow>
void update(Wide* weight, Wide* mean, Wide* square, const Gradient* gradient, Narrow* narrow, int64_t length,
            const double* given, int threads) {
    Settings<Wide> with;
    Wide* const each = &with.scale;
    for (int number = 0; number < 8; number++) each[number] = static_cast<Wide>(given[number]);
    const bool quick = divides_quickly(with.scale) && divides_quickly(with.root_correction);
    const int64_t chunks = (length + CHUNK - 1) / CHUNK;
    const int team = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, chunks)));
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
    for (int64_t start = 0; start < length; start += CHUNK) {
        const int64_t end = std::min(length, start + CHUNK);
        if constexpr (sizeof(Wide) == 4) {
            if (quick && (with.scale == 1 || !has_tiny(gradient, start, end))) {
                update_chunk<true, Keeps, Narrows>(weight, mean, square, gradient, narrow, start, end, with);
                continue;
            }
        }
        update_chunk<false, Keeps, Narrows>(weight, mean, square, gradient, narrow, start, end, with);
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
