// Tiles in registers and in shared memory, and descriptors of the latter. Registers are in the fragment order of mma.sync and wgmma.
//
// A base tile is 16x16 over a warp. Lane l holds pairs along the columns, with g = l / 4 and t = l % 4:
//   data[0] = (g, 2t..)   data[1] = (g + 8, 2t..)   data[2] = (g, 8 + 2t..)   data[3] = (g + 8, 8 + 2t..)
// Over a warpgroup, warp w holds rows 16w.. of a 64-row tile.
#pragma once

namespace kittens {

template <typename T>
concept register_tile = requires {
    T::height;
    T::packed_per_tile;
};

template <typename _T> struct rt_base {
    static constexpr int packed_per_thread = 4;
    typename base_types::packing<_T>::packed_type data[packed_per_thread];
};

// Tile of _rows x _cols elements held by one warp, as height x width base tiles.
template <typename _T, int _rows, int _cols> struct rt {
    using T = _T;
    using T2 = typename base_types::packing<T>::packed_type;
    using dtype = T2;
    static constexpr int rows = _rows, cols = _cols;
    static_assert(rows % BASE_TILE_DIM == 0 && cols % BASE_TILE_DIM == 0, "rows and columns must be multiples of 16");
    static constexpr int height = rows / BASE_TILE_DIM, width = cols / BASE_TILE_DIM;
    static constexpr int packed_per_tile = rt_base<T>::packed_per_thread;

    rt_base<T> tiles[height][width];

    __device__ inline void operator=(const T &value) {
        each_pair([&](dtype &pair) { pair = base_types::packing<T>::pack(value); });
    }
    template <typename F> __device__ inline void each_pair(F &&f) {
#pragma unroll
        for (int i = 0; i < height; i++)
#pragma unroll
            for (int j = 0; j < width; j++)
#pragma unroll
                for (int k = 0; k < packed_per_tile; k++) f(tiles[i][j].data[k]);
    }
};
template <int _r, int _c> using rt_fl = rt<float, _r, _c>;

// Swizzled tiles in shared memory, and their wgmma matrix descriptors.
//
// A tile of rows x cols is a sequence of panels, each rows x (swizzle_bytes / sizeof(T)) elements, row after row. Within a panel the
// 16-byte chunk index is XORed with address bits 7.. (3, 2 or 1 of them for 128, 64, 32-byte swizzle): what TMA writes and wgmma reads
// for the swizzle mode of that width. Tiles must start at multiples of 8 * swizzle_bytes.
template <typename T>
concept shared_tile = requires { T::swizzle_bytes; };

namespace detail {
// Byte offset of element (r, c) in a tile of panels of panel_rows rows, before swizzling.
template <typename T, int swizzle_bytes> __device__ static inline uint32_t panel_offset(int panel_rows, int r, int c) {
    constexpr int panel_cols = swizzle_bytes / sizeof(T);
    return (c / panel_cols) * panel_rows * swizzle_bytes + r * swizzle_bytes + (c % panel_cols) * sizeof(T);
}
template <int swizzle_bytes> __device__ static inline uint32_t swizzled(uint32_t address) {
    return address ^ (((address % (swizzle_bytes * 8)) >> 7) << 4);
}
}  // namespace detail

template <typename _T, int _rows, int _cols, bool _swizzle = true, int _swizzle_bytes = 0> struct __align__(128) st {
    using T = _T;
    using dtype = T;
    static_assert(_swizzle, "tiles without a swizzle are not covered");
    static constexpr int rows = _rows, cols = _cols;
    static_assert(rows % BASE_TILE_DIM == 0 && cols % BASE_TILE_DIM == 0, "rows and columns must be multiples of 16");
    // the widest swizzle that divides a row, unless the caller asks for a narrower one
    static constexpr int row_bytes = cols * sizeof(dtype);
    static constexpr int swizzle_bytes = _swizzle_bytes > 0 ? _swizzle_bytes : row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
    static_assert(row_bytes % swizzle_bytes == 0, "a row must be a whole number of panels");

    dtype data[rows * cols];

    __device__ static inline uint32_t idx(uint32_t ptr, int2 rc) {
        return detail::swizzled<swizzle_bytes>(ptr + detail::panel_offset<T, swizzle_bytes>(rows, rc.x, rc.y));
    }

    // columns idx * sub_cols.. as a tile in its own right: whole panels
    template <int sub_cols> __device__ inline st<T, _rows, sub_cols, true, swizzle_bytes> &subtile(int idx) {
        static_assert(sub_cols * sizeof(T) % swizzle_bytes == 0, "a column range must be whole panels");
        return *reinterpret_cast<st<T, _rows, sub_cols, true, swizzle_bytes> *>(&data[rows * sub_cols * idx]);
    }
};

// wgmma matrix descriptor of a 16-bit tile (PTX ISA, "Matrix descriptor format"): address, leading and stride byte offsets in units of
// 16 bytes, swizzle mode 1, 2, 3 for 128, 64, 32 bytes.
//   K-major  (contraction along the columns): stride = 8 rows; the leading offset is not used.
//   MN-major (contraction along the rows):    stride = 8 rows; leading = distance to the next panel.
template <shared_tile ST, int MN_major> struct st_descriptor {
    static constexpr int rows = ST::rows, swizzle_bytes = ST::swizzle_bytes;
    static_assert(sizeof(typename ST::T) == 2, "descriptors are for 16-bit tiles");
    static constexpr uint64_t mode = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : 3;
    uint64_t base_desc;

    // In a cluster a shared::cluster address carries the CTA's rank from bit 24 on: the mask keeps the offset within the CTA.
    __device__ static inline uint64_t encode(uint64_t bytes) { return (bytes & 0x3FFFF) >> 4; }
    __device__ inline st_descriptor(const ST &tile)
        : base_desc(encode(__cvta_generic_to_shared(&tile.data[0])) | encode(MN_major ? rows * swizzle_bytes : 16) << 16 |
                    encode(8 * swizzle_bytes) << 32 | mode << 62) {}
    // the k-th 16 elements along the contraction
    __device__ inline uint64_t chunk_descriptor(int k) const {
        if constexpr (MN_major) return base_desc + encode(k * 16 * swizzle_bytes);
        constexpr int per_panel = swizzle_bytes / 32;
        return base_desc + encode((k % per_panel) * 32 + (k / per_panel) * rows * swizzle_bytes);
    }
};

}  // namespace kittens
