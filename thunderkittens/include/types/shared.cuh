// Shared-memory vectors and swizzled tiles, and the wgmma matrix descriptors of tiles.
//
// A tile of rows x cols is a sequence of panels, each rows x (swizzle_bytes / sizeof(T)) elements, row after row. Within a panel the
// 16-byte chunk index is XORed with address bits 7.. (3, 2 or 1 of them for 128, 64, 32-byte swizzle): what TMA writes and wgmma reads
// for the swizzle mode of that width. Tiles must start at multiples of 8 * swizzle_bytes.
#pragma once

namespace kittens {
namespace ducks {
namespace sv {
struct identifier {};
template <typename T>
concept all = std::is_same_v<typename T::identifier, identifier>;
}  // namespace sv
namespace st {
struct identifier {};
template <typename T>
concept all = std::is_same_v<typename T::identifier, identifier>;
}  // namespace st
}  // namespace ducks

template <typename _T, size_t _length> struct __align__(128) sv {
    using identifier = ducks::sv::identifier;
    using T = typename base_types::packing<_T>::unpacked_type;
    using T2 = typename base_types::packing<_T>::packed_type;
    using dtype = T;
    static constexpr int length = _length;
    static_assert(length % BASE_TILE_DIM == 0, "length must be a multiple of 16");
    static constexpr int tiles = length / BASE_TILE_DIM;
    static constexpr int num_alloc_elements = (length * sizeof(dtype) + 127) / 128 * 128 / sizeof(dtype);

    dtype data[num_alloc_elements];

    __device__ inline dtype &operator[](size_t i) { return data[i]; }
    __device__ inline const dtype &operator[](size_t i) const { return data[i]; }
    template <int sub_length> __device__ inline sv<_T, sub_length> &subvec(int i) {
        return *reinterpret_cast<sv<_T, sub_length> *>(&data[i * sub_length]);
    }
};
template <size_t _length> using sv_bf = sv<bf16, _length>;
template <size_t _length> using sv_hf = sv<half, _length>;
template <size_t _length> using sv_fl = sv<float, _length>;

namespace detail {
// Byte offset of element (r, c) in a tile of panels of panel_rows rows, before swizzling.
template <typename T, int swizzle_bytes> __device__ static inline uint32_t panel_offset(int panel_rows, int r, int c) {
    constexpr int panel_cols = swizzle_bytes / sizeof(T);
    return (c / panel_cols) * panel_rows * swizzle_bytes + r * swizzle_bytes + (c % panel_cols) * sizeof(T);
}
template <int swizzle_bytes, typename A> __device__ static inline A swizzled(A address) {
    return address ^ (((address % (swizzle_bytes * 8)) >> 7) << 4);
}
}  // namespace detail

// Part of a tile, for loads and stores (not an operand of wgmma).
template <typename _ST, int _rows, int _cols> struct st_subtile {
    using identifier = ducks::st::identifier;
    using ST = _ST;
    using T = typename ST::T;
    using T2 = typename ST::T2;
    using dtype = T;
    static constexpr bool swizzle = ST::swizzle;
    static constexpr int swizzle_bytes = ST::swizzle_bytes;
    static constexpr int underlying_rows = ST::underlying_rows, underlying_cols = ST::underlying_cols;
    static constexpr int rows = _rows, cols = _cols, num_elements = rows * cols;
    static_assert(rows % BASE_TILE_DIM == 0 && cols % BASE_TILE_DIM == 0, "rows and columns must be multiples of 16");

    dtype *data;
    int row_offset, col_offset;

    __device__ st_subtile(ST &src, int2 rowcol) : data(src.data), row_offset(rowcol.x * rows), col_offset(rowcol.y * cols) {}
    __device__ inline uint32_t idx(uint32_t ptr, int2 coord) const { return ST::idx(ptr, {coord.x + row_offset, coord.y + col_offset}); }
    __device__ inline dtype &operator[](const int2 &rowcol) { return *ST::idx(data, {rowcol.x + row_offset, rowcol.y + col_offset}); }
};

template <typename _T, int _rows, int _cols, bool _swizzle = true, int _swizzle_bytes = 0> struct __align__(128) st {
    using identifier = ducks::st::identifier;
    using T = typename base_types::packing<_T>::unpacked_type;
    using T2 = typename base_types::packing<_T>::packed_type;
    using dtype = T;
    static constexpr bool swizzle = _swizzle;
    static constexpr int rows = _rows, cols = _cols, num_elements = rows * cols;
    static constexpr int underlying_rows = rows, underlying_cols = cols, underlying_num_elements = num_elements;
    static_assert(rows % BASE_TILE_DIM == 0 && cols % BASE_TILE_DIM == 0, "rows and columns must be multiples of 16");
    // the widest swizzle that divides a row, unless the caller asks for a narrower one
    static constexpr int row_bytes = cols * sizeof(dtype);
    static constexpr int swizzle_bytes = _swizzle_bytes > 0 ? _swizzle_bytes : row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
    static_assert(row_bytes % swizzle_bytes == 0, "a row must be a whole number of panels");

    dtype data[rows * cols];

    __device__ static inline uint32_t idx(uint32_t ptr, int2 rc) {
        if constexpr (!swizzle) return ptr + sizeof(T) * (rc.x * cols + rc.y);
        else return detail::swizzled<swizzle_bytes>(ptr + detail::panel_offset<T, swizzle_bytes>(rows, rc.x, rc.y));
    }
    __device__ static inline T *idx(T *ptr, int2 rc) {
        if constexpr (!swizzle) return ptr + rc.x * cols + rc.y;
        else
            return reinterpret_cast<T *>(detail::swizzled<swizzle_bytes>(reinterpret_cast<uintptr_t>(ptr) +
                                                                         detail::panel_offset<T, swizzle_bytes>(rows, rc.x, rc.y)));
    }
    __device__ inline dtype &operator[](const int2 &rc) { return *idx(data, rc); }
    __device__ inline const dtype &operator[](const int2 &rc) const { return *idx(const_cast<dtype *>(data), rc); }
    __device__ inline dtype &operator[](int i) { return data[i]; }

    template <int sub_rows, int sub_cols> __device__ inline st_subtile<st, sub_rows, sub_cols> subtile(int2 rowcol) {
        return {*this, rowcol};
    }
    // columns idx * sub_cols.. as a tile in its own right: whole panels
    template <int sub_cols> __device__ inline st<_T, _rows, sub_cols, _swizzle, swizzle_bytes> &subtile(int idx) {
        static_assert(sub_cols * sizeof(T) % swizzle_bytes == 0, "a column range must be whole panels");
        return *reinterpret_cast<st<_T, _rows, sub_cols, _swizzle, swizzle_bytes> *>(&data[rows * sub_cols * idx]);
    }
    using col_vec = sv<dtype, rows>;
    using row_vec = sv<dtype, cols>;
};
template <int _r, int _c, bool _swizzle = true, int _swizzle_bytes = 0> using st_bf = st<bf16, _r, _c, _swizzle, _swizzle_bytes>;
template <int _r, int _c, bool _swizzle = true, int _swizzle_bytes = 0> using st_hf = st<half, _r, _c, _swizzle, _swizzle_bytes>;
template <int _r, int _c, bool _swizzle = true, int _swizzle_bytes = 0> using st_fl = st<float, _r, _c, _swizzle, _swizzle_bytes>;

namespace ducks {
namespace st_descriptor {
struct identifier {};
}  // namespace st_descriptor
}  // namespace ducks

// wgmma matrix descriptor of a 16-bit tile (PTX ISA, "Matrix descriptor format"): address, leading and stride byte offsets in units of
// 16 bytes, swizzle mode 1, 2, 3 for 128, 64, 32 bytes.
//   K-major  (contraction along the columns): stride = 8 rows; the leading offset is not used.
//   MN-major (contraction along the rows):    stride = 8 rows; leading = distance to the next panel.
template <ducks::st::all _ST, int MN_major> struct st_descriptor {
    using identifier = ducks::st_descriptor::identifier;
    using ST = _ST;
    using T = typename ST::T;
    static constexpr int rows = ST::rows, cols = ST::cols, swizzle_bytes = ST::swizzle_bytes;
    static_assert(ST::swizzle && sizeof(T) == 2, "descriptors are for swizzled 16-bit tiles");
    static_assert(rows == ST::underlying_rows && cols == ST::underlying_cols, "descriptors are for whole tiles");
    static constexpr uint64_t mode = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : 3;
    uint64_t base_desc;

    // In a cluster a shared::cluster address carries the CTA's rank from bit 24 on: the mask keeps the offset within the CTA.
    __device__ static inline uint64_t encode(uint64_t bytes) { return (bytes & 0x3FFFF) >> 4; }
    __device__ inline st_descriptor(const ST &tile)
        : base_desc(encode(__cvta_generic_to_shared(&tile.data[0])) | encode(MN_major ? rows * swizzle_bytes : 16) << 16 |
                    encode(8 * swizzle_bytes) << 32 | mode << 62) {}
    __device__ inline st_descriptor(const st_descriptor &other) : base_desc(other.base_desc) {}
    // the k-th 16 elements along the contraction
    __device__ inline uint64_t chunk_descriptor(int k) const {
        if constexpr (MN_major) return base_desc + encode(k * 16 * swizzle_bytes);
        constexpr int per_panel = swizzle_bytes / 32;
        return base_desc + encode((k % per_panel) * 32 + (k / per_panel) * rows * swizzle_bytes);
    }
};

namespace ducks {
namespace st_descriptor {
template <typename T>
concept input = ducks::st::all<T> || std::is_same_v<typename T::identifier, identifier>;
namespace detail {
template <typename T> struct st_getter {
    using type = typename T::ST;
};
template <ducks::st::all T> struct st_getter<T> {
    using type = T;
};
template <typename T> using get_st = typename st_getter<T>::type;
}  // namespace detail
}  // namespace st_descriptor
}  // namespace ducks
}  // namespace kittens
