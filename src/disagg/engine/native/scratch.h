// Memory that a thread keeps for the next call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace disagg {

template <class T>
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(data_); }

    // At least `size` elements, of any value.
    T *take(int64_t size) {
        if (size > size_) {
            std::free(data_);
            int64_t bytes = (size * int64_t(sizeof(T)) + 4095) / 4096 * 4096;
            data_ = static_cast<T *>(std::aligned_alloc(64, bytes));
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = size;
        }
        return data_;
    }

  private:
    T *data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace disagg
